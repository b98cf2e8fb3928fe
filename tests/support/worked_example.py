"""The tables of the worked example in docs/algorithm.md, as csrc/moe has them.

`python -m support.worked_example`, in `tests`, writes them into the document, and a test compares them with it.
`csrc/verify` is asked for the row tables and the task lists of one small call.
"""

import itertools
import sys

from support.documents import ROOT
from support.verifier import ask

DOCUMENT = ROOT / "docs" / "algorithm.md"

# Two ranks with three tokens, two slots a token, and two experts each; -1 is no expert.
RANKS, TOKENS, TOP_K, LOCAL_EXPERTS = 2, 3, 2, 2
IDS = [[0, 2, 1, 0, 2, 3], [2, 0, 3, 2, -1, 1]]  # [rank, slot]

# Row blocks: what default_ring_rows gives for this shape, and the GPU's default minibatch.
RING_BLOCKS, MINIBATCH_BLOCKS = 2, 64
SHAPE = RANKS, TOKENS, TOP_K, LOCAL_EXPERTS, RING_BLOCKS, MINIBATCH_BLOCKS

# Of count_tiles for H = 512, I = 256 with tiles as wide as Hopper's: gate_up, down, hidden_grad, row_grad, weight_grad;
# and bands of columns.
TILES = 2, 2, 1, 2, 2 * 4 + 2 * 2, 2

SAVE_PRE_ACTIVATIONS = 1
DIRECTIONS = {"forward": 0, "backward": 1}


def row_table() -> str:
    """The rows of both ranks that are not padding."""
    lines = ["| rank | row | row block | local expert | comes from rank | slot | token, k |", "|---|" + "---|" * 6]
    for rank in range(RANKS):
        table = ask("rows", rank, *SHAPE, itertools.chain(*IDS))
        for row, (source, slot) in enumerate(zip(table["row_rank"], table["row_slot"], strict=True)):
            if source < 0:
                continue
            block = row // 128
            expert = max(e for e in range(LOCAL_EXPERTS) if table["expert_block"][e] <= block)
            lines.append(
                f"| {rank} | {row} | {block} | {expert} | {source} | {slot} | {slot // TOP_K}, {slot % TOP_K} |"
            )
    return "\n".join(lines)


def task_lists(direction: str, rank: int = 0) -> str:
    """Both lists of a rank. Neighbours that differ in their part alone are one line."""
    lists = ask("program", DIRECTIONS[direction], SAVE_PRE_ACTIVATIONS, *SHAPE, TILES, itertools.chain(*IDS))
    lines = ["| list | tickets | task | waits for | signals |", "|---|---|---|---|---|"]
    for name, tasks in zip(("communication", "compute"), lists[2 * rank : 2 * rank + 2], strict=True):
        tickets = enumerate(tasks)
        for _, group in itertools.groupby(tickets, key=lambda ticket: {**ticket[1], "part": None}):
            first, *rest = group
            lines.append(_line(name, rank, first, rest[-1] if rest else first))
    return "\n".join(lines)


def _line(name: str, rank: int, first: tuple[int, dict], last: tuple[int, dict]) -> str:
    (begin, task), (end, last_task) = first, last
    tickets = str(begin) if begin == end else f"{begin}-{end}"
    waits = "; ".join(f"{_counter(*wait, own=rank)} >= {wait[2]}" for wait in task["waits"]) or "nothing"
    signals = "; ".join(f"{_counter(*signal, own=rank)} += {signal[2]}" for signal in task["signals"]) or "nothing"
    return f"| {name} | {tickets} | {_describe(task, last_task['part'])} | {waits} | {signals} |"


def _describe(task: dict, last_part: int) -> str:
    part = str(task["part"]) if task["part"] == last_part else f"{task['part']}-{last_part}"
    of = {"reduce": f"of token block {task['block']}", "weight_grad": f"of expert {task['expert']}"}
    what = {"pull_rows": "part", "pull_grads": "part", "notify": "band", "reduce": "band"}.get(task["kind"], "tile")
    return f"`{task['kind']}` {of.get(task['kind'], f'of block {task["block"]}')}, {what} {part}"


def _counter(family: str, index: int, _: int, rank: int, *, own: int) -> str:
    if family == "pushed":
        band, block = divmod(index, RING_BLOCKS)  # the call has as many blocks as the ring
        return f"`pushed` of block {block}, band {band}"
    kind = "band" if family == "arrived" else "piece" if family.startswith("piece_") else "block"
    return f"`{family}` of {kind} {index}" + (f" at rank {rank}" if rank != own or family == "arrived" else "")


def tables() -> dict[str, str]:
    """Each table under the name of its markers."""
    return {"rows": row_table()} | {direction: task_lists(direction) for direction in DIRECTIONS}


def error(direction: str) -> str:
    """What the verifier finds wrong with the call."""
    machine = 0, 1, 1, 5
    case = DIRECTIONS[direction], SAVE_PRE_ACTIVATIONS, *SHAPE, TILES, machine, itertools.chain(*IDS)
    return ask("enumerate", *case)["error"]


def main() -> None:
    """Writes the tables into the document."""
    sys.path.insert(0, str(ROOT))  # as `python -m pytest` has it
    from benchmarks.picture import replace_between

    text = DOCUMENT.read_text()
    for name, table in tables().items():
        text = replace_between(text, name, table)
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()

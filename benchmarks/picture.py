"""``python -m benchmarks.picture``: README's table of measured speed, and ``docs/speed.svg``, from ``results/``.

Both are functions of committed files alone, so that a test can render them again and compare. The files are those that
measured the megakernel and its peers in one process, in bursts; where the machine did not keep its state, and the file
therefore says ``usable: false``, figures are in parentheses and bars are pale.
"""

import html
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import GPU_SHAPES, SHAPES

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speed.svg"
FILES = {"forward": "h200-forward-peers.json", "backward": "h200-backward-peers.json"}
COMMIT = "0a13ae5"  # as results/README.md has it

OURS = "megakernel"
NAMES = {
    OURS: "mok_jax",
    "pallas-mgpu": "Pallas ragged dot",
    "torch-compiled": "torch grouped_mm, compiled",
    "torch": "torch grouped_mm",
}

# Of a light and of a dark page, each with its own background, so that text can be read on any.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.page { fill: #ffffff; stroke: #d0d7de; } .line { stroke: #8c959f; } .value { font-size: 10px; }
.b0 { fill: #0969da; } .b1 { fill: #bf8700; } .b2 { fill: #8c959f; } .b3 { fill: #c8ced4; } .pale { opacity: 0.4; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .page { fill: #0d1117; stroke: #30363d; } .line { stroke: #8b949e; }
.b0 { fill: #4493f8; } .b1 { fill: #d29922; } .b2 { fill: #8b949e; } .b3 { fill: #57606a; }
}
"""


class Results(NamedTuple):
    """What was measured in one direction: ``meta`` of the file, and records by shape and implementation."""

    meta: dict[str, Any]
    records: dict[tuple[str, str], dict[str, Any]]


def load(direction: str) -> Results:
    """Reads a direction's file."""
    file = json.loads((ROOT / "benchmarks" / "results" / FILES[direction]).read_text())
    records = [r for r in file["records"] if r["error"] is None]
    if any((r["pass"], r["protocol"], r["routing"]) != (direction, "burst", "uniform") for r in records):
        raise ValueError(f"{FILES[direction]} holds more than bursts of the {direction} with uniform routing")
    if not file["meta"]["commit"].startswith(COMMIT):
        raise ValueError(f"{FILES[direction]} is of commit {file['meta']['commit']}, not {COMMIT}")
    return Results(file["meta"], {(r["shape"], r["implementation"]): r for r in records})


def replace_between(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of that name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the text has no place marked {name}, or several")
    return pattern.sub(lambda _: f"{begin}{content}\n{end}", text)


def table() -> str:
    """The rate over C, and how many times as fast as each peer; with what was measured where."""
    results = {direction: load(direction) for direction in FILES}
    lines = [
        "| layer | H | I | experts | T | K | forward / C | x Pallas | x torch | backward / C | x Pallas |",
        "|---|" + "---:|" * 10,
    ]
    for name in GPU_SHAPES:
        shape = SHAPES[name]
        sizes = shape.hidden, shape.intermediate, shape.experts, shape.tokens, shape.top_k
        cells = [name, *map(str, sizes)]
        for direction, peers in (("forward", ("pallas-mgpu", "torch-compiled")), ("backward", ("pallas-mgpu",))):
            cells += _cells(results[direction].records, name, peers)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", caption(results)])


def _cells(records: dict, shape: str, peers: tuple[str, ...]) -> list[str]:
    ours = records[shape, OURS]
    values = [ours["over_c"], *(records[shape, peer]["ms"] / ours["ms"] for peer in peers)]
    return [f"{value:.2f}" if ours["usable"] else f"({value:.2f})" for value in values]


def caption(results: dict[str, Results]) -> str:
    """What the figures are, in one paragraph of lines as long as the README's."""
    metas = [r.meta for r in results.values()]
    (device,) = {meta["device"] for meta in metas}
    versions = metas[0]["versions"]
    ceilings = [record["c_tflops"] for r in results.values() for record in r.records.values()]
    return (
        f"One {device}, bf16, uniform routing, commit {COMMIT}, jax {versions['jax']}, torch {versions['torch']}.\n"
        f"`C` is an 8192^3 product of cuBLAS, measured beside each layer: {min(ceilings):.0f} to {max(ceilings):.0f} "
        "TFLOP/s.\n"
        "In parentheses: `C` moved by more than 3 % meanwhile, which makes the figure unusable."
    )


# ---- The picture.

WIDTH, HEIGHT, MARGIN, PANEL_HEIGHT, PANEL_STEP, TOP = 860, 500, 50, 170, 235, 60


def picture() -> str:
    """A panel for each direction: bars of the rate over C, by shape."""
    parts = [f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>']
    x = MARGIN
    for number, name in enumerate(NAMES.values()):
        parts += [f'<rect class="b{number}" x="{x}" y="18" width="12" height="12"/>', _text(x + 18, 28, name)]
        x += 40 + 7 * len(name)
    parts.append(_text(WIDTH - MARGIN, 28, "pale: unusable", "end"))
    for number, direction in enumerate(FILES):
        parts += _panel(direction, load(direction).records, TOP + number * PANEL_STEP)
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _panel(direction: str, records: dict, top: int) -> list[str]:
    base, group = top + PANEL_HEIGHT, (WIDTH - 2 * MARGIN) / len(GPU_SHAPES)
    parts = [_text(MARGIN, top - 8, f"{direction}: rate over C (1 = cuBLAS's 8192^3 product)")]
    for level in (0.0, 0.5, 1.0):
        y = base - level * PANEL_HEIGHT
        dashes = "" if level == 0 else ' stroke-dasharray="2 4"'
        parts.append(f'<line class="line" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}"{dashes}/>')
        parts.append(_text(MARGIN - 8, y + 4, f"{level:.1f}", "end"))
    for place, shape in enumerate(GPU_SHAPES):
        there = [(i, records[shape, name]) for i, name in enumerate(NAMES) if (shape, name) in records]
        width = 0.84 * group / max(3, len(there))
        left = MARGIN + (place + 0.5) * group - width * len(there) / 2
        for number, (color, record) in enumerate(there):
            height, x = record["over_c"] * PANEL_HEIGHT, left + number * width
            pale = "" if record["usable"] else " pale"
            rectangle = f'x="{x:.1f}" y="{base - height:.1f}" width="{width - 2:.1f}" height="{height:.1f}"'
            parts.append(f'<rect class="b{color}{pale}" {rectangle}/>')
            parts.append(_text(x + width / 2 - 1, base - height - 4, f"{record['over_c']:.2f}", "middle", "value"))
        parts.append(_text(MARGIN + (place + 0.5) * group, base + 18, shape, "middle"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    of_class = f' class="{style}"' if style else ""
    return f'<text{of_class} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def main() -> None:
    """Writes both."""
    README.write_text(replace_between(README.read_text(), "speed", table()))
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()

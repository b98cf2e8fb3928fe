"""Results as a file, as a table and as a picture. The file is the original: the other two are drawn from it."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

META_KEYS = ("device", "clocks", "power", "versions", "commit", "date")

# What every record has. A record of something that did not run has None for all it did not measure, and an "error".
RECORD_KEYS = (
    "shape",
    "pass",
    "ep",
    "data",
    "routing",
    "implementation",
    "protocol",
    "over_c",
    "ms",
    "ms_min",
    "ms_max",
    "tflops",
    "c_tflops",
    "over_c_min",
    "cycle_efficiency",
    "peak_bytes",
    "host_us",
    "checked",
    "errors",
    "drift",
    "usable",
    "error",
)
_MEASURED_KEYS = RECORD_KEYS[RECORD_KEYS.index("over_c") : RECORD_KEYS.index("checked")]


def make_record(**values: Any) -> dict[str, Any]:
    """A record with all keys, those that are not given being None (``checked`` and ``usable``: False)."""
    unknown = set(values) - set(RECORD_KEYS)
    if unknown:
        raise ValueError(f"no such keys: {sorted(unknown)}")
    return dict.fromkeys(RECORD_KEYS) | {"checked": False, "usable": False} | values


def check_schema(results: dict[str, Any]) -> None:
    """Raises ValueError where ``results`` is not what a results file must hold."""
    missing = [key for key in META_KEYS if key not in results["meta"]]
    if missing:
        raise ValueError(f"meta lacks {missing}")
    for record in results["records"]:
        if tuple(record) != RECORD_KEYS:
            raise ValueError(f"a record has the keys {list(record)}; expected {list(RECORD_KEYS)}")
        measured = [key for key in _MEASURED_KEYS if record[key] is not None]
        if record["error"] is None and not {"over_c", "ms", "ms_min", "ms_max", "tflops", "host_us"} <= set(measured):
            raise ValueError(f"a record has neither an error nor all measurements: {record}")


def write_json(results: dict[str, Any], path: Path) -> None:
    """Writes the file anew, whole or not at all."""
    check_schema(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def print_table(results: dict[str, Any], console: Console) -> None:
    """One line for each implementation of each group, with all protocols side by side."""
    meta = results["meta"]
    table = Table(title=f"{meta['device']}, {meta['commit'][:12]}", title_justify="left")
    for column in ("shape", "pass", "ep", "routing", "implementation"):
        table.add_column(column)
    for column in ("burst / C", "ms", "matched", "sustained", "ms", "TFLOP/s", "cycles", "GiB", "host us"):
        table.add_column(column, justify="right")
    last_group = None
    for line, records in _lines(results["records"]).items():
        group = line[:-1]
        if last_group not in (None, group):
            table.add_section()
        last_group = group
        table.add_row(*map(str, line), *_cells(records))
    console.print(table)
    where: dict[tuple[str, str], list[str]] = {}
    for r in results["records"]:
        if r["error"]:
            where.setdefault((r["implementation"], r["error"]), []).append(f"{r['shape']} {r['pass']} {r['routing']}")
    for (name, error), groups in where.items():
        places = ", ".join(dict.fromkeys(groups))
        console.print(f"{name}: {error} ({places})", style="yellow", markup=False, highlight=False)


def _lines(records: list[dict]) -> dict[tuple, dict[str, dict]]:
    lines: dict[tuple, dict[str, dict]] = {}
    for r in records:
        ranks = f"{r['data']}x{r['ep']}" if r["data"] > 1 else r["ep"]
        lines.setdefault((r["shape"], r["pass"], ranks, r["routing"], r["implementation"]), {})[r["protocol"]] = r
    return lines


def _cells(records: dict[str, dict]) -> list[str]:
    measured = [r for r in records.values() if not r["error"]]
    if not measured:
        return ["[yellow]none, see below"] + [""] * 8
    any_record = measured[0]
    cells = []
    for protocol in ("burst", "matched", "sustained"):
        r = records.get(protocol)
        cells.append(_ratio(r) if r in measured else "")
        if protocol != "matched":
            cells.append(f"{r['ms']:.3f}" if r in measured else "")
    peak, efficiency = any_record["peak_bytes"], any_record["cycle_efficiency"]
    return [
        *cells,
        f"{any_record['tflops']:.3g}",
        "" if efficiency is None else f"{efficiency:.3f}",
        "" if peak is None else f"{peak / 2**30:.3g}",
        f"{any_record['host_us']:.0f}",
    ]


def _ratio(record: dict) -> str:
    """The rate over C; in parentheses where the machine drifted."""
    text = f"{record['over_c']:.3f}"
    return text if record["usable"] else f"[red]({text})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of the rate over C, a panel for each pass and protocol; pale where the machine drifted."""
    import matplotlib

    matplotlib.use("Agg")  # No display is needed, or looked for.
    import matplotlib.pyplot as plt

    records = [r for r in results["records"] if r["error"] is None]
    if not records:
        return
    panels = list(dict.fromkeys((r["pass"], r["protocol"]) for r in records))
    cases = list(dict.fromkeys((r["shape"], r["routing"], r["ep"], r["data"]) for r in records))
    names = list(dict.fromkeys(r["implementation"] for r in records))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(4 + 1.3 * len(cases), 2.6 * len(panels)), squeeze=False, layout="constrained"
    )
    for (pass_name, protocol), panel in zip(panels, axes[:, 0], strict=True):
        for number, name in enumerate(names):
            mine = {
                (r["shape"], r["routing"], r["ep"], r["data"]): r
                for r in records
                if (r["implementation"], r["pass"], r["protocol"]) == (name, pass_name, protocol)
            }
            unusable = {case for case in mine if not mine[case]["usable"]}
            positions = [place + (number + 0.5) / len(names) * 0.8 - 0.4 for place in range(len(cases))]
            heights = [mine[case]["over_c"] if case in mine else 0.0 for case in cases]
            bars = panel.bar(positions, heights, 0.8 / len(names), label=name, color=f"C{number}")
            labels = [f"{height:.2f}" if height else "" for height in heights]
            for bar, case in zip(bars, cases, strict=True):
                bar.set_alpha(0.3 if case in unusable else 1.0)
            panel.bar_label(bars, labels=labels, fontsize=6, rotation=90, padding=2)
        panel.set_ylabel(f"{pass_name}\n{protocol}, rate / C")
        panel.set_xticks(range(len(cases)), [_case_name(*case) for case in cases])
        panel.axhline(1.0, color="0.5", linewidth=0.8)
        panel.margins(y=0.2)
        panel.grid(axis="y", alpha=0.3)
    axes[0, 0].legend(frameon=False, fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    meta = results["meta"]
    figure.suptitle(f"{meta['device']}, {meta['date']}, {meta['commit'][:12]}", fontsize=8)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _case_name(shape: str, routing: str, ep: int, data: int) -> str:
    ranks = "" if ep * data == 1 else f"\n{data} x {ep} ranks" if data > 1 else f"\n{ep} ranks"
    return f"{shape}\n{routing}{ranks}"

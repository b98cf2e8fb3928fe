"""Runs small steps of the GPU kernels, forward and backward, under compute-sanitizer, and says what it found.

``python -m support.sanitize_gpu [memcheck racecheck synccheck ...]`` in ``tests``; ends with 1 if a step itself went
wrong or a tool found anything.
"""

import collections
import re
import subprocess
import sys

from support import cuda_programs

# By tool, how the program is built for it. racecheck follows barriers only where every lane arrives (sm90/tile.cuh).
TOOLS = {"memcheck": (), "racecheck": ("-DMOK_EVERY_LANE_ARRIVES",)}
# Few CTAs, as every instruction takes long under these tools.
SMALL = {"hidden": 136, "intermediate": 136, "reserve": 124, "repeats": 1, "timeout-us": 240_000_000}
STEPS = {
    # Macrobatches that straddle experts, and both ways to communicate.
    "straddling": SMALL | {"ranks": 2, "tokens": 320, "ring-rows": 256, "comm-ctas": "0,1"},
    # An expert of so many rows that pairs share its weight gradients.
    "shared": SMALL | {"ranks": 1, "tokens": 640, "experts": 2, "ring-rows": 0, "comm-ctas": 0},
}
TIMEOUT_S = 130  # of a step


def arguments(settings):
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def sanitize(tool):
    """Whether nothing was found, and a summary of what was printed."""
    sanitizer = cuda_programs.find_tool("compute-sanitizer")
    assert sanitizer, "compute-sanitizer is not on the path"
    under = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "200")
    program = cuda_programs.build("stand_alone", "-lineinfo", *TOOLS.get(tool, ()))
    outputs, clean = [], True
    for name, step in STEPS.items():
        try:
            status, output = cuda_programs.run(program, *arguments(step), under=under, timeout_s=TIMEOUT_S)
        except subprocess.TimeoutExpired as expired:
            status, output = 1, f"{(expired.stdout or b'').decode()}\nnot done after {TIMEOUT_S} s"
        clean &= status == 0
        outputs.append(f"{name}:\n{summary(output)}")
    return clean, "\n".join(outputs)


def summary(output):
    """Lines of the program and totals as they are; of the findings each kind of line once, with its number."""
    told, found = [], collections.Counter()
    for line in output.splitlines():
        if not line.startswith("=" * 9):
            told.append(line)
        elif "SUMMARY" in line:
            told.append(line.strip("= "))
        elif re.search(r"(Error|Warning|Race|Invalid|hazard)", line):
            found[re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d+ hazards", "*", line.strip("= "))] += 1
    return "\n".join([*told, *(f"{count:6} x {line}" for line, count in found.most_common(20))])


def main(tools):
    clean = True
    for tool in tools:
        good, found = sanitize(tool)
        clean &= good
        print(f"--- {tool}: {'clean' if good else 'not clean'}\n{found}", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or TOOLS))

"""Starts processes that are the ranks of one run, and waits for them.

``python -m support.start_ranks 4 [options]`` has them run the tests of several ranks; :func:`start`, any program.

Where there are as many GPUs, each rank has one. Else all share those that there are, which NCCL allows from 2.30 on, by
MPS where the machine has it and by time slices otherwise; a rank then leaves the others their multiprocessors.
"""

import argparse
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from support.processes import free_port

# A library with which ranks can share a GPU, of tests that start ranks themselves.
NCCL = os.environ.get("NCCL") or None
GRACE_S = 20
PORTS = 4  # that ranks may meet at, one after the other
# CTAs of a collective of NCCL's, of each rank that shares a GPU: those that wait for peers must leave room for theirs.
NCCL_CTAS = 2


class Ended(NamedTuple):
    """How a rank's process has ended: negative by a signal, `late` if it had to be killed."""

    status: int
    output: str
    late: bool


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--nccl", help="libnccl.so.2, 2.30 or newer, to be loaded before any other")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all")
    options, arguments = parser.parse_known_args()
    if reason := why_not(options.ranks, options.nccl):
        print(f"skipped: {reason}")
        return 0
    command = [sys.executable, "-m", "pytest", "-m", "ranks", *arguments]
    ended = start(options.ranks, command, nccl=options.nccl, limit_s=options.limit)
    for rank, process in enumerate(ended):
        if rank == 0 or process.status:
            print(f"---- rank {rank}: exit status {process.status}", *process.output.splitlines()[-40:], sep="\n")
    return max(abs(process.status) for process in ended)


def why_not(ranks, nccl):
    """Why this machine cannot have so many ranks; None: it can."""
    if gpus() >= ranks or (gpus() and nccl):
        return None
    return f"{ranks} ranks, {gpus()} GPUs; to share them, name an NCCL >= 2.30: NCCL=libnccl.so.2"


@functools.cache
def gpus():
    if not shutil.which("nvidia-smi"):
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True).stdout.splitlines())


def start(ranks, command, *, nccl, limit_s, grace_s=GRACE_S, beside=True, variables=lambda rank: {}):
    """Runs ``command`` once a rank and returns how each has ended, a list of ``Ended``.

    Args:
      ranks: how many.
      command: its arguments may have ``{rank}``, ``{port}`` (where all can meet) and ``{reserved}`` (multiprocessors
        of the GPU that are not the rank's) in them; the variables MOK_RANKS, MOK_RANK, MOK_PORTS, MOK_RESERVED_SMS and
        MOK_FOLDER (empty at first, of all) say the same and more.
      nccl: a library with which ranks can share a GPU; None if each has one.
      limit_s: seconds for all.
      grace_s: seconds that are left to the others when one has failed.
      beside: whether ranks that share a GPU may run beside each other. A process that is killed may take those with it
        that run beside it.
      variables: of the environment, by rank.
    """
    sharing = gpus() < ranks
    with contextlib.ExitStack() as stack:
        folder, own_folder = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        shared = shared_variables(ranks, nccl) if sharing else {}
        if sharing and beside:
            shared |= stack.enter_context(mps(own_folder))
        ports = [str(free_port()) for _ in range(PORTS)]
        logs = [Path(own_folder, f"rank{rank}.log") for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            own = {"MOK_RANKS": str(ranks), "MOK_RANK": str(rank), "MOK_PORTS": ",".join(ports), "MOK_FOLDER": folder}
            own |= {"JAX_PLATFORMS": "cuda,cpu", "PYTHONFAULTHANDLER": "1"}
            own |= shared or {"CUDA_VISIBLE_DEVICES": str(rank)}
            fields = {"rank": rank, "port": ports[0], "reserved": shared.get("MOK_RESERVED_SMS", 0)}
            processes.append(
                subprocess.Popen(
                    [argument.format(**fields) for argument in command],
                    env=os.environ | own | variables(rank),
                    stdout=log.open("w"),
                    stderr=subprocess.STDOUT,
                )
            )
        late = wait(processes, limit_s, grace_s)
        ended = zip(processes, logs, late, strict=True)
        return [Ended(process.wait(), log.read_text(), was_late) for process, log, was_late in ended]


def shared_variables(ranks, nccl):
    """Of a rank that shares a GPU."""
    of_rank = (multiprocessors() // ranks - NCCL_CTAS) // 2 * 2
    return {
        "LD_PRELOAD": os.path.abspath(nccl),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": str(NCCL_CTAS),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "MOK_RESERVED_SMS": str(multiprocessors() - of_rank),
    }


@functools.cache
def multiprocessors():
    """Of a GPU; asked in a process of its own, which then does not hold it."""
    code = "import jax; print(jax.devices('gpu')[0].core_count)"
    variables = os.environ | {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return int(subprocess.run([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, check=True).stdout)


@contextlib.contextmanager
def mps(folder):
    """Lets processes run on a GPU beside each other, where the machine has the server for that."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not control:
        yield {}
        return
    variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in variables.values():
        os.mkdir(path)
    subprocess.run([control, "-d"], env=os.environ | variables, check=True)
    try:
        yield variables
    finally:
        subprocess.run([control], input="quit\n", text=True, env=os.environ | variables, timeout=30)


def wait(processes, limit_s, grace_s):
    """Ends those that are left when one has failed, or time is up; which they were."""
    end = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + grace_s)
        time.sleep(0.1)
    late = [process.poll() is None for process in processes]
    for process in processes:
        process.send_signal(signal.SIGABRT)  # which prints where it is
    time.sleep(1 if any(late) else 0)
    for process in processes:
        process.kill()
    return late


if __name__ == "__main__":
    sys.exit(main())

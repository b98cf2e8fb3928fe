"""Starts processes that run the tests of several ranks together: ``python -m support.start_ranks 4 [options]``.

Where there are as many GPUs, each rank has one. Else all share those that there are, which NCCL allows from 2.30 on, by
MPS where the machine has it and by time slices otherwise; a rank then leaves the others their multiprocessors.
"""

import argparse
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.processes import free_port

GRACE_S = 20  # for the others, when one has failed
# CTAs of a collective of NCCL's, of each rank that shares a GPU: those that wait for peers must leave room for theirs.
NCCL_CTAS = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--nccl", help="libnccl.so.2, 2.30 or newer, to be loaded before any other")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all")
    options, arguments = parser.parse_known_args()
    gpus = len(subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True).stdout.splitlines())
    sharing = gpus < options.ranks
    if gpus == 0 or (sharing and not options.nccl):
        print(f"skipped: {options.ranks} ranks, {gpus} GPUs; to share them, name an NCCL >= 2.30: NCCL=libnccl.so.2")
        return 0
    with tempfile.TemporaryDirectory() as folder, mps(folder) if sharing else contextlib.nullcontext() as shared:
        environments = [environment(rank, options, shared) for rank in range(options.ranks)]
        port = str(free_port())
        logs = [Path(folder, f"rank{rank}.log") for rank in range(options.ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", "-m", "ranks", *arguments],
                env=variables | {"MOK_PORT": port},
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for variables, log in zip(environments, logs, strict=True)
        ]
        statuses = wait(processes, options.limit)
        for rank, (status, log) in enumerate(zip(statuses, logs, strict=True)):
            if rank == 0 or status:
                print(f"---- rank {rank}: exit status {status}", *log.read_text().splitlines()[-40:], sep="\n")
    return max(map(abs, statuses))


def environment(rank, options, shared):
    """Variables of a rank's process; ``shared`` are those of all that share a GPU, None where each rank has one."""
    variables = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "MOK_RANKS": str(options.ranks), "MOK_RANK": str(rank)}
    if shared is None:
        return variables | {"CUDA_VISIBLE_DEVICES": str(rank)}
    of_rank = (multiprocessors() // options.ranks - NCCL_CTAS) // 2 * 2
    return (
        variables
        | shared
        | {
            "LD_PRELOAD": os.path.abspath(options.nccl),
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_CTAS": str(NCCL_CTAS),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "MOK_RESERVED_SMS": str(multiprocessors() - of_rank),
        }
    )


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
    multiprocessors()  # before the server has the GPU
    variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in variables.values():
        os.mkdir(path)
    subprocess.run([control, "-d"], env=os.environ | variables, check=True)
    try:
        yield variables
    finally:
        subprocess.run([control], input="quit\n", text=True, env=os.environ | variables, timeout=30)


def wait(processes, limit_s):
    """Exit statuses. When one has failed, or time is up, the others are ended."""
    end = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + GRACE_S)
        time.sleep(0.1)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


if __name__ == "__main__":
    sys.exit(main())

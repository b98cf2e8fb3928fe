"""``python -m support.faulty_rank FAULT``: a rank of several, of which the last one does something wrong.

All make a call that succeeds, then the last rank goes wrong in the next call, then all try one more. Each prints what
it was told, as lines of JSON: ``{"call": text}`` and ``{"next": text}``, null where there was no error.
"""

import ctypes
import functools
import json
import os
import signal
import sys
import time

import jax
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import native
from support import ranks
from support.cases import Case, make, zipf
from support.ranks import RANK, RANKS

ENTRY_S, WORK_S, LATE_S = 6, 4, 20
IS_WRONG = RANK == RANKS - 1
LAYERS = 400  # which take longer than a second
LARGE = 4096  # tokens, of a call whose peers need memory that takes notice


def program(name="a_call", *, tokens=96, hidden=128, layers=1, entry_s=ENTRY_S, first=lambda x: x, alone=False):
    """A program of that name, bound to its operands: ``layers`` after each other on what ``first`` makes of the tokens,
    over all ranks, or by each alone on its own tokens.
    """
    config = ranks.own_share(mok_jax.MoKConfig(entry_timeout_s=entry_s, timeout_s=WORK_S))
    axis = None if alone else "expert"
    moe = functools.partial(mok_jax.moe, axis_name=axis, config=config, implementation="megakernel")
    inputs = make(Case("fault", tokens * RANKS, 2, 4 * RANKS, hidden, 64, zipf), "bfloat16")
    mesh = ranks.mesh_of(expert=RANKS)
    specs = (P("expert"),) * 3 + (P() if alone else P("expert"),) * 3

    def run(x, *others):
        if layers == 1:
            return moe(first(x), *others)
        return jax.lax.fori_loop(0, layers, lambda _, x: moe(x, *others).astype(x.dtype), first(x))

    run.__name__ = name
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=False))
    return lambda: step(*(ranks.place(a, mesh, spec) for a, spec in zip(inputs[:6], specs, strict=True)))


def told(action):
    """The error that an action ends with, or that was reported meanwhile; None if there is neither."""
    try:
        jax.block_until_ready(action())
        mok_jax.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def never_starts(ordinary):
    if IS_WRONG:
        return lambda: time.sleep(ENTRY_S + 2)
    return ordinary


def killed(_):
    long = program("a_long_call", layers=LAYERS)
    if IS_WRONG:

        def die():
            long()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

        return die
    return long


def late(_):
    patient = program("a_patient_call", entry_s=LATE_S + 10)

    def run():
        if IS_WRONG:
            time.sleep(LATE_S)
        return patient()

    return run


def another_call(ordinary):
    return program("another_call") if IS_WRONG else ordinary


def another_shape(ordinary):
    """In an arena of the same class."""
    return program(tokens=95) if IS_WRONG else ordinary


def another_size(ordinary):
    """In an arena of another class."""
    return program(tokens=800) if IS_WRONG else ordinary


def host_error(_):
    """After the others have entered the call, or may have."""

    def work(x):
        if IS_WRONG:
            time.sleep(1)
            raise ValueError("the data are broken")
        return x

    def on_host(x):
        return jax.pure_callback(work, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return program("after_a_callback", first=on_host)


def no_memory(_):
    """Of a rank that may use less of the GPU than the others, for what its peers read and write: XLA has enough."""
    jax.block_until_ready(program("alone", tokens=LARGE, hidden=4096, alone=True)())
    if IS_WRONG:
        take_memory()
    return program("a_large_call", tokens=LARGE, hidden=4096)


def take_memory():
    """All that the process may have of the GPU, but for a little."""
    driver, context, block = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxPushCurrent_v2(context)
    for mib in 64, 2:
        while driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(mib << 20)) == 0:
            last = block.value
    driver.cuMemFree_v2(ctypes.c_uint64(last))


def another_build(_):
    if IS_WRONG:
        native.INTERFACE += 1
    return program("of_another_build")


FAULTS = (
    never_starts,
    killed,
    late,
    another_call,
    another_shape,
    another_size,
    host_error,
    no_memory,
    another_build,
)


def main(name):
    ranks.join()
    ordinary = program()
    jax.block_until_ready(ordinary())
    action = {fault.__name__: fault for fault in FAULTS}[name](ordinary)
    print(json.dumps({"call": told(action)}), flush=True)
    print(json.dumps({"next": told(ordinary)}), flush=True)
    if name == "killed":  # JAX would wait for the dead one; and the first process must not be the first to go
        time.sleep(3 if RANK == 0 else 0)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

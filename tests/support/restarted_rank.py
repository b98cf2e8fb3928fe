"""``python -m support.restarted_rank ROLE FOLDER MEETING``: a rank in a process of its own, started by one that runs
`test_gpu_interplay`. It runs that file's step, as loaded from the folder or compiled here, and compares with one rank.
"""

import sys

import jax
import jax.export
from jax.sharding import NamedSharding

import mok_jax
from support import interplay, ranks


def main(role, folder, meeting):
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
    ranks.join(int(meeting))
    arguments = interplay.place(interplay.problem())
    step = interplay.jit_over_ranks(interplay.one_layer)
    if role == "load":
        mok_jax.register_ffi_targets()
        with open(f"{folder}/program{ranks.RANK}", "rb") as file:
            exported = jax.export.deserialize(bytearray(file.read()))
        mesh = ranks.mesh_of(expert=ranks.RANKS)
        shardings = tuple(NamedSharding(mesh, spec) for spec in interplay.SPECS)
        step = jax.jit(exported.call, in_shardings=shardings)
    for _ in range(interplay.TIMES):
        actual = step(*arguments)
    interplay.assert_alike(actual, interplay.alone(interplay.one_layer))
    print(f"same bits; {len(hits)} programs were in the cache")


if __name__ == "__main__":
    main(*sys.argv[1:])

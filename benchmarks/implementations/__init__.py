"""Everything that is measured, by the name it has in records, in the order in which it runs."""

from benchmarks.implementations import mok, pallas_mgpu, tokamax, torch_grouped, unfused

IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        mok.MEGAKERNEL,
        mok.QUARTER_RING,
        mok.F32_WEIGHTS,
        mok.XLA,
        pallas_mgpu.PALLAS_MGPU,
        tokamax.TOKAMAX,
        torch_grouped.TORCH,
        torch_grouped.TORCH_COMPILED,
        unfused.IDEAL_UNFUSED,
    )
}

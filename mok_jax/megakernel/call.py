"""What a call site fixes, apart from the shapes of its operands."""

import dataclasses
import math

import numpy as np

from mok_jax import native
from mok_jax.activation import ACTIVATIONS, Activation
from mok_jax.config import SAVE_POLICIES, MoKConfig, Save

# XLA's CPU collectives end the process after 40 s without a peer; ours must give up, with an error, before that.
HOST_TIMEOUT_LIMIT_S = 30.0
TIMEOUT_S = 30.0
GPU_ENTRY_TIMEOUT_S = 600.0

_SAVE_CODES: dict[Save, int] = {"nothing": 0, "pre_activations": 1, "pre_activations_and_rows": 2}
assert set(_SAVE_CODES) == set(SAVE_POLICIES)
_ACTIVATION_CODES: dict[Activation, int] = {"swiglu": 0, "gpt_oss": 1}
assert set(_ACTIVATION_CODES) == set(ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class Call:
    """The parameter of every primitive."""

    ranks: int
    ring_rows: int
    max_rows: int
    activation: Activation
    activation_limit: float | None
    config: MoKConfig
    differentiated: bool = False
    weight_grad_dtype: np.dtype | None = None
    axes: tuple[str, ...] = ()
    """Of the mesh, those that the ranks are along, the first one slowest."""
    virtual_ranks: int = 1
    """Ranks that one GPU runs side by side, their arrays one after the other: more than 1 in tests alone."""

    @property
    def save(self) -> Save:
        return self.config.save if self.differentiated else "nothing"

    @property
    def ring_may_overflow(self) -> bool:
        """Whether more rows than the ring holds can arrive, so that there can be several macrobatches."""
        return self.max_rows > self.ring_rows

    def attributes(self, platform: str) -> dict[str, np.generic]:
        """As ``csrc/ffi/attributes.h`` reads them; -1 leaves a choice to the handler."""
        config = self.config

        def or_unset(value: int | None) -> int:
            return -1 if value is None else value

        entry_timeout_s = config.entry_timeout_s or GPU_ENTRY_TIMEOUT_S
        timeout_s = config.timeout_s or TIMEOUT_S
        if platform == "cpu":
            entry_timeout_s, timeout_s = (min(t, HOST_TIMEOUT_LIMIT_S) for t in (entry_timeout_s, timeout_s))
        return {
            "ranks": np.int32(self.ranks),
            "save": np.int32(_SAVE_CODES[self.save]),
            "activation": np.int32(_ACTIVATION_CODES[self.activation]),
            "activation_limit": np.float32(math.inf if self.activation_limit is None else self.activation_limit),
            "ring_rows": np.int64(self.ring_rows),
            "minibatch_rows": np.int64(or_unset(config.minibatch_rows)),
            "communication_workers": np.int32(or_unset(config.host_comm_workers)),
            "compute_workers": np.int32(or_unset(config.host_compute_workers)),
            "delay_seed": np.int64(config.host_delay_seed),
            "entry_timeout_s": np.float64(entry_timeout_s),
            "timeout_s": np.float64(timeout_s),
            "communication_sms": np.int32(or_unset(config.comm_sms)),
            "reserved_sms": np.int32(or_unset(config.reserve_sms)),
            "virtual_ranks": np.int32(self.virtual_ranks),
        }


def make_call(ranks, tokens, top_k, local_experts, activation, activation_limit, config) -> Call:
    """The parameters of a call of these shapes, of one rank each: what sizes its buffers depends on nothing else."""
    bounds = {"ranks": ranks, "tokens": tokens, "top_k": top_k, "local_experts": local_experts}
    library = native.library()
    max_rows = library.max_rows(**bounds)
    ring_rows = min(max_rows, config.ring_rows or library.default_ring_rows(**bounds))
    return Call(ranks, ring_rows, max_rows, activation, activation_limit, config)

"""What crosses the FFI is checked by the handlers, buffer by buffer, before any executor reads or writes it.

The targets are called without the primitives in front of them: as a program that other sources have made would.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mok_jax import megakernel, native
from mok_jax.config import SAVE_POLICIES, MoKConfig
from mok_jax.megakernel.buffers import Spec, empty_residuals

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 6, 2, 3, 16, 24
DIRECTIONS = ("forward", "backward")
ON = (pytest.param("cpu", id="cpu"), pytest.param("gpu", id="gpu", marks=pytest.mark.gpu))


@dataclasses.dataclass
class Direct:
    """A call of a target where no token chooses an expert, and all else is zero: right as made, to be made wrong."""

    target: str
    operands: dict[str, Spec]
    results: dict[str, Spec]
    attributes: dict[str, np.generic]

    def run(self, platform="cpu"):
        """The results by name."""
        native.register_ffi_targets()
        results = [jax.ShapeDtypeStruct(*spec) for spec in self.results.values()]
        with jax.default_device(jax.devices(platform)[0]):
            operands = [
                jnp.full(spec.shape, -(name == "expert_ids"), spec.dtype) for name, spec in self.operands.items()
            ]
            step = jax.jit(lambda *operands: jax.ffi.ffi_call(self.target, results)(*operands, **self.attributes))
            return dict(zip(self.results, jax.device_get(step(*operands)), strict=True))

    def assert_refused(self, text, platform="cpu"):
        with pytest.raises(jax.errors.JaxRuntimeError) as refusal:
            self.run(platform)
        assert f"mok_jax: {self.target}: {text}" in str(refusal.value)

    def buffers(self, kind):
        return {"operand": self.operands, "result": self.results}[kind]


def direct(direction, platform="cpu", save="pre_activations_and_rows", dtype=None) -> Direct:
    dtype = jnp.dtype(dtype or {"cpu": "float32", "gpu": "bfloat16"}[platform])
    call = megakernel.make_call(1, TOKENS, TOP_K, EXPERTS, "swiglu", None, MoKConfig(save=save, ring_rows=128))
    call = dataclasses.replace(call, differentiated=True, weight_grad_dtype=dtype)
    like, slots = jax.ShapeDtypeStruct, (TOKENS, TOP_K)
    wi, wo = like((EXPERTS, HIDDEN, INTERMEDIATE), dtype), like((EXPERTS, INTERMEDIATE, HIDDEN), dtype)
    arrays = jax.eval_shape(
        megakernel.ForwardOperands.of,
        where=like((2,), np.int32),
        x=like((TOKENS, HIDDEN), dtype),
        expert_ids=like(slots, np.int32),
        expert_weights=like(slots, np.float32),
        wi_0=wi,
        wi_1=wi,
        wo=wo,
    )
    operands = megakernel.ForwardOperands(*(Spec(array.shape, array.dtype) for array in arrays))
    results = megakernel.forward_results(call, operands)
    if direction == "backward":
        operands = megakernel.BackwardOperands.of(operands, operands.x, megakernel.residuals_of(call, results))
        operands = operands._replace(**empty_residuals(operands))
        results = megakernel.backward_results(call, operands)
    attributes = {"interface": np.int32(native.INTERFACE), **call.attributes("cpu" if platform == "cpu" else "cuda")}
    attributes |= {"groups": np.zeros(1, np.int64), "program": np.int64(0)}
    return Direct(f"mok_{direction}", operands._asdict(), results._asdict(), attributes)


@pytest.mark.parametrize("platform", ON)
@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_call_runs(direction, save, platform):
    results = direct(direction, platform, save).run(platform)
    if direction == "forward":
        assert not results["y"].any()
    else:
        assert not any(gradient.any() for gradient in megakernel.BackwardResults(**results).gradients)


@pytest.mark.parametrize("platform", ON)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_another_interface(direction, platform):
    call, number = direct(direction, platform), native.INTERFACE
    call.attributes["interface"] += 1
    text = f"the program is of interface {number + 1}, the extension of interface {number}: mok_jax's Python sources"
    call.assert_refused(text, platform)
    del call.attributes["interface"]
    call.assert_refused(f"the program is of an unknown interface, the extension of interface {number}", platform)


@pytest.mark.parametrize("platform", ON)
@pytest.mark.parametrize("kind", ("operand", "result"))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_missing_and_extra_buffers(direction, kind, platform):
    call = direct(direction, platform)
    buffers, count = call.buffers(kind), len(call.buffers(kind))
    buffers["extra"] = Spec((3,), np.float32)
    call.assert_refused(f"there are {count + 1} {kind}s; it must be {count}", platform)
    del buffers["extra"]
    name, _ = buffers.popitem()
    call.assert_refused(f"{kind} {name} is missing: there are {count - 1}", platform)


BUFFERS = [
    (direction, kind, name) for direction in DIRECTIONS for kind in ("operand", "result")
    for name in direct(direction).buffers(kind)
]  # fmt: skip
# Of dimensions that these decide, those that come later are found wrong.
DECIDED_BY = {"x": "wi_0", "expert_ids": "expert_weights", "wi_0": "wi_1"}
HLO_NAMES = {"float32": "F32", "int32": "S32", "uint32": "U32", "uint8": "U8", "float16": "F16"}


def described(spec):
    return f"{HLO_NAMES[np.dtype(spec.dtype).name]}[{','.join(map(str, spec.shape))}]"


@pytest.mark.parametrize(("direction", "kind", "name"), BUFFERS)
def test_every_buffer_is_checked_by_name(direction, kind, name):
    """Both lists, of Python and of C++, agree on what the n-th buffer is: whichever is wrong is named."""
    call = direct(direction)
    right = call.buffers(kind)[name]
    for wrong in (
        Spec(right.shape, np.float16),
        Spec((*right.shape, 1), right.dtype),
        Spec((0, *right.shape[1:]), right.dtype),
    ):
        if wrong == right:  # empty as it should be
            continue
        call.buffers(kind)[name] = wrong
        call.assert_refused(f"{kind} {name} is {described(wrong)}; it must be ")
    if right.shape:
        call.buffers(kind)[name] = wrong = Spec((*right.shape[:-1], right.shape[-1] + 1), right.dtype)
        found = DECIDED_BY.get(name, name) if kind == "operand" else name
        text = f"{kind} {found} is {described(call.buffers(kind)[found])}; it must be "
        call.assert_refused(text if found != name else text + described(right))


def test_weight_gradients_are_of_one_type():
    """That of the tokens, or float32."""
    call = direct("backward", dtype="bfloat16")
    call.run()
    for name in ("wi_0_grad", "wi_1_grad", "wo_grad"):
        call.results[name] = call.results[name]._replace(dtype=np.float32)
    call.run()
    call.results["wo_grad"] = call.results["wo_grad"]._replace(dtype=jnp.bfloat16)
    call.assert_refused("result wo_grad is BF16[3,24,16]; it must be F32[3,24,16]")


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    (
        ("ring_rows", np.int64(0), "ring_rows is 0; it must be a multiple of 128"),
        ("ring_rows", np.int64(200), "ring_rows is 200; it must be a multiple of 128"),
        ("ranks", np.int32(0), "ranks is 0; it must be at least 1"),
        ("virtual_ranks", np.int32(2), "virtual_ranks is 2; it must be 1, or all 1 of ranks"),
        ("timeout_s", np.float32(1), "attribute timeout_s: "),
    ),
)
def test_attributes(attribute, value, text):
    call = direct("forward")
    call.attributes[attribute] = value
    call.assert_refused(text)


def test_a_larger_ring_than_its_buffers():
    """What the sizes come from is checked with them: nothing is written beyond what Python has allocated."""
    call = direct("forward")
    rows = call.results["rows"].shape[0]
    call.attributes["ring_rows"] = np.int64(rows + 128)
    call.assert_refused(f"result pre_activations is U32[{rows},256]; it must be U32[{rows + 128},256]")

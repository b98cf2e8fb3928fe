"""What a layer is: its arguments, checked, the parameters that follow from them, and where those lie on a mesh."""

import dataclasses
import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax.core import spmd
from flax.linen import logical_to_mesh_axes
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from mok_jax import checks, routing, sharding
from mok_jax.activation import Activation
from mok_jax.api import Implementation
from mok_jax.config import MoKConfig, require_choice
from mok_jax.layer import splitting
from mok_jax.work import Direction, flops, product_flops

GATES = ("gate", "shared_gate")
"""Parameters that are a module's ``kernel``; all others but ``GATE_BIAS`` are the layer's own."""

GATE_BIAS = "gate_bias"
"""The parameter that is the ``bias`` of the module ``gate``."""


class Parameter(NamedTuple):
    """How a parameter is made.

    Attributes:
      shape: of the whole array.
      axes: a logical name for each dimension, see :func:`mok_jax.sharding.logical_axis_rules`.
      init: ``(key, shape, dtype) -> array``.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a layer is: the arguments of ``mok_jax.nnx.MoE`` and ``mok_jax.linen.MoE``, checked.

    Parameters: ``gate/kernel [H, E]``, ``wi_0, wi_1 [E, H, I]``, ``wo [E, I, H]``; with biases also ``wi_0_bias,
    wi_1_bias [E, I]``, ``wo_bias [E, H]``; with shared experts, side by side in matrices of width ``S``, ``shared_wi_0,
    shared_wi_1 [H, S]``, ``shared_wo [S, H]`` and perhaps ``shared_gate/kernel [H, 1]``; with a router's bias also
    ``gate/bias [E]``.

    The router's bias is part of its logits, ``x @ gate/kernel + gate/bias``: of choice, weights and losses. It is
    trained, unlike ``expert_bias``, which only steers the choice.

    Shared experts are a SwiGLU on every token, added to what its experts give, with a gate times
    ``sigmoid(x @ shared_gate)``. They are computed outside the ``shard_map``; ``activation`` and
    ``activation_limit`` are not for them, but ``shared_activation_limit`` is.

    Where the mesh does not divide ``E``, the first dimension of the experts' weights (and biases) is
    ``padded_experts``, with zeros in the padding. The router, ``expert_bias``, load and losses keep ``E``: no token can
    choose padding, its gradients are exact zeros, and it stays zero. A checkpoint of ``E`` experts is loaded with as
    many zeros at the end: ``jnp.pad(w, ((0, settings.padded_experts - E), (0, 0), (0, 0)))``; the other way round,
    ``w[:E]``.

    With ``use_bias`` expert ``e`` computes ``act(x @ wi_0[e] + wi_0_bias[e], x @ wi_1[e] + wi_1_bias[e]) @ wo[e] +
    wo_bias[e]``, ``act`` being its activation. No kernel knows of it: the first two biases are one more row of
    ``wi_0`` and ``wi_1`` that meets a 1 in the token, with 7 rows of zeros to keep ``H`` a multiple of 8, and the
    third is the product ``[N, E] @ [E, H]`` of the tokens' weights and ``wo_bias`` in f32. It costs a copy of the
    experts' weights in each direction, 8 more columns in all products, rows and buffers (0.3 % for gpt-oss), and
    ``2 N E H`` FLOPs in f32, twice that in the backward. The copy is not kept for the backward; the price of that is
    that ``"xla"`` and ``"reference"`` compute their forward again. The first two biases are rounded to ``dtype`` as
    weights are.

    Attributes:
      hidden_size: ``H``.
      intermediate_size: ``I``, of one expert.
      num_experts: ``E``, at least the expert axis' size.
      num_experts_per_tok: ``K``.
      score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``, see :func:`mok_jax.routing.expert_scores`.
      softmax_after_topk: take the softmax over a token's chosen logits only (gpt-oss).
      num_groups: groups of experts, a divisor of ``E``, see :func:`mok_jax.routing.top_k_routing`.
      group_topk: groups that a token may choose from.
      norm_topk_prob: scale a token's ``K`` weights to sum to 1.
      routed_scaling_factor: multiplies the weights after that.
      apply_router_weight_on_input: multiply what goes into a token's expert by its weight, instead of what comes out
        (Llama-4): ``sum_k f_e(w[k] * x)`` with ``e = ids[k]``. The product is rounded to ``dtype``. For the kernels
        every slot is then a token with one expert, so ``x`` takes ``K`` times the room in them.
      router_bias: whether the router's logits have a bias (gpt-oss).
      expert_bias: whether to have a bias that steers the choice of experts but not their weights; ``None`` is no. It
        is made in f32, whatever ``param_dtype``, and computed with in f32, whatever it was cast to.
      expert_bias_update_rate: step of ``MoEOutput.expert_bias_update``.
      aux_loss_coeff: factor of the load-balancing loss, a Python number, like all factors here. For a schedule give 1.0
        and multiply ``out.aux_loss``.
      seq_aux: take that loss of each sequence, the last of the leading dimensions of ``x``, instead of the batch.
      z_loss_coeff: factor of the router z-loss.
      num_shared_experts: experts that every token goes to.
      shared_intermediate_size: width of one shared expert; ``None`` takes ``intermediate_size``.
      shared_expert_gate: multiply what shared experts give by a sigmoid gate (Qwen2-MoE, Qwen3.5).
      shared_activation_limit: clamp gate and up of the shared experts as ``activation_limit`` does in the others
        (DeepSeek-V4, with the same limit).
      use_bias: whether the routed experts' products have biases (gpt-oss).
      activation: of the experts, see :func:`mok_jax.moe`.
      activation_limit: of the experts, see :func:`mok_jax.moe`.
      dtype: what the experts compute and return; ``None`` takes the input's.
      param_dtype: of all parameters.
      kernel_init: ``(key, shape, dtype) -> array`` of all kernels, the router's, the experts' and the shared experts';
        ``None`` is LeCun normal. It makes one expert at a time, from a key and as a matrix ``[in, out]`` of its own, so
        that initialisers which scale by the fan see that of an expert; padding stays zero. An array is expected, not a
        box with axes (``nn.with_partitioning``): those are the layer's. One of your own is best made once, since
        layers of different functions are different to ``jit``.
      mesh: the devices to run on, all its axes; ``None`` for one device.
      expert_axis: the mesh axis, or axes, that the experts are split over; tokens are split over all axes.
      config: tuning of the kernels, see :class:`mok_jax.MoKConfig`.
      implementation: see :func:`mok_jax.moe`.

    Raises:
      ValueError: a number is too small, the expert axis is larger than ``E``, ``K > E``, groups do not divide ``E`` or
        hold too few experts, a name is unknown, something is said of shared experts where there are none, or the mesh
        has no such axis, or axes of several types.
      TypeError: ``expert_bias`` is no bool, a factor no Python number, ``kernel_init`` no function, ``dtype`` or
        ``param_dtype`` neither bfloat16 nor float32, ``activation_limit`` or ``shared_activation_limit`` no number,
        ``config`` no ``MoKConfig``, or an argument not hashable.

    Example:
      >>> Settings(8, 16, num_experts=4, num_experts_per_tok=2).parameters()["wo"].shape
      (4, 16, 8)
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    _: dataclasses.KW_ONLY
    score_function: str = "softmax"
    softmax_after_topk: bool = False
    num_groups: int = 1
    group_topk: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    apply_router_weight_on_input: bool = False
    router_bias: bool = False
    expert_bias: bool | None = None
    expert_bias_update_rate: float = 0.001
    aux_loss_coeff: float = 0.0
    seq_aux: bool = False
    z_loss_coeff: float = 0.0
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    shared_activation_limit: float | None = None
    use_bias: bool = False
    activation: Activation = "swiglu"
    activation_limit: float | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable[..., jax.Array] | None = None
    mesh: Mesh | None = None
    expert_axis: str | tuple[str, ...] = sharding.EXPERT_AXIS
    config: MoKConfig | None = None
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("hidden_size", self.hidden_size, 1),
            ("intermediate_size", self.intermediate_size, 1),
            ("num_experts", self.num_experts, 1),
            ("num_shared_experts", self.num_shared_experts, 0),
            ("shared_intermediate_size", self.shared_intermediate_size, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}; the nearest is {least}.")
        if self.num_shared_experts < 1 and self.shared_intermediate_size is not None:
            self._refuse_without_shared_experts(f"shared_intermediate_size={self.shared_intermediate_size}")
        if self.num_shared_experts < 1 and self.shared_expert_gate:
            self._refuse_without_shared_experts("shared_expert_gate=True")
        if self.num_shared_experts < 1 and self.shared_activation_limit is not None:
            self._refuse_without_shared_experts(f"shared_activation_limit={self.shared_activation_limit}")
        if self.expert_bias is not None and not isinstance(self.expert_bias, bool):
            raise TypeError(
                f"expert_bias is {self.expert_bias!r}; it must be True, False or None. "
                "For a value of your own, set the layer's expert_bias after expert_bias=True."
            )
        for name, dtype in (("dtype", self.dtype), ("param_dtype", self.param_dtype)):
            if dtype is not None and (dtype := jnp.dtype(dtype)) not in (jnp.bfloat16, jnp.float32, jnp.float64):
                raise TypeError(f"{name} is {dtype}; it must be bfloat16 or float32.")
        for name, out in (
            ("aux_loss_coeff", "aux_loss"),
            ("z_loss_coeff", "z_loss"),
            ("expert_bias_update_rate", "expert_bias_update"),
        ):
            if not isinstance(value := getattr(self, name), numbers.Real):
                raise TypeError(
                    f"{name} is {value!r}; it must be a Python number, such as 0.01. For one that is traced or of "
                    f"a schedule, give 1.0 and multiply out.{out} by it."
                )
        if not isinstance(self.routed_scaling_factor, numbers.Real):
            raise TypeError(
                f"routed_scaling_factor is {self.routed_scaling_factor!r}; it must be a Python number, known while "
                "tracing, such as 2.5."
            )
        if self.kernel_init is not None and not callable(self.kernel_init):
            raise TypeError(
                f"kernel_init is {self.kernel_init!r}; it must be None or a function (key, shape, dtype) -> array, "
                "such as jax.nn.initializers.normal(0.02)."
            )
        routing.check_experts_per_token(self.num_experts_per_tok, self.num_experts)
        routing.check_groups(self.num_groups, self.group_topk, self.num_experts, self.num_experts_per_tok)
        routing.check_score_function(self.score_function, self.softmax_after_topk)
        checks.check_expert_step(self.activation, self.activation_limit, self.config or MoKConfig())
        checks.check_activation_limit("shared_activation_limit", self.shared_activation_limit)
        if self.implementation is not None:
            require_choice("implementation", self.implementation, get_args(Implementation))
        axes = (self.expert_axis,) if isinstance(self.expert_axis, str) else self.expert_axis
        if not isinstance(axes, tuple) or not axes or len(set(axes)) < len(axes):
            raise TypeError(
                f"expert_axis is {self.expert_axis!r}; it must be the name of a mesh axis, or a tuple of different ones"
            )
        if self.mesh is not None and len(set(self.mesh.axis_types)) > 1:
            raise ValueError(
                f"mesh has axes {self.mesh.axis_names} of types {self.mesh.axis_types}; all must be of one type, "
                "AxisType.Auto as mok_jax.sharding.make_mesh makes them, or AxisType.Explicit."
            )
        if self.num_experts < self._expert_parallelism:
            raise ValueError(
                f"num_experts={self.num_experts} must be at least the expert axis' size ({self._expert_parallelism}); "
                f"the nearest is {self._expert_parallelism}, or a mesh with a smaller expert axis."
            )
        self._check_hashable()

    def _check_hashable(self) -> None:
        """Layers of equal settings share programs: said here, since ``jit`` would not say of which argument."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{field.name} is {value!r}; it must be hashable: a tuple instead of a list, a Python number "
                    "instead of an array, a function or a frozen dataclass instead of another object."
                ) from None

    def _refuse_without_shared_experts(self, argument: str) -> None:
        raise ValueError(
            f"{argument} has no meaning with num_shared_experts={self.num_shared_experts}; "
            "the nearest with shared experts is num_shared_experts=1."
        )

    def split(self) -> splitting.Split | None:
        """How tokens are split over devices where the layer is called."""
        return splitting.split_over(self.mesh, self.expert_axis)

    @property
    def _expert_parallelism(self) -> int:
        return 1 if self.mesh is None else sharding.axis_size(self.mesh, self.expert_axis)

    @property
    def padded_experts(self) -> int:
        """First dimension of the experts' weights: ``E``, or more where the mesh does not divide it."""
        return sharding.pad_experts(self.num_experts, self._expert_parallelism).num_experts

    def parameters(self) -> dict[str, Parameter]:
        """The layer's parameters, without ``expert_bias``, which no optimizer moves; the order is that of keys."""
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.padded_experts
        dense = jax.nn.initializers.lecun_normal()
        each = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        if self.kernel_init is not None:
            dense, each = _arrays_of(self.kernel_init), _for_each_expert(_arrays_of(self.kernel_init))
        each = self._without_padding(each)
        # Not "exp" on the gate's second axis: every rank routes its own tokens over all experts.
        table = {
            "gate": Parameter((hidden, self.num_experts), ("embed", None), dense),
            "wi_0": Parameter((experts, hidden, inner), ("exp", "embed", "mlp"), each),
            "wi_1": Parameter((experts, hidden, inner), ("exp", "embed", "mlp"), each),
            "wo": Parameter((experts, inner, hidden), ("exp", "mlp", "embed"), each),
        }
        if self.num_shared_experts:
            width = self.num_shared_experts * (self.shared_intermediate_size or inner)
            table |= {
                "shared_wi_0": Parameter((hidden, width), ("embed", "mlp"), dense),
                "shared_wi_1": Parameter((hidden, width), ("embed", "mlp"), dense),
                "shared_wo": Parameter((width, hidden), ("mlp", "embed"), dense),
            }
        if self.shared_expert_gate:
            table["shared_gate"] = Parameter((hidden, 1), ("embed", None), dense)
        if self.use_bias:
            zeros = jax.nn.initializers.zeros
            table |= {
                "wi_0_bias": Parameter((experts, inner), ("exp", "mlp"), zeros),
                "wi_1_bias": Parameter((experts, inner), ("exp", "mlp"), zeros),
                "wo_bias": Parameter((experts, hidden), ("exp", "embed"), zeros),
            }
        if self.router_bias:
            table[GATE_BIAS] = Parameter((self.num_experts,), (None,), jax.nn.initializers.zeros)
        return table

    def flops(self, tokens: int, direction: Direction = "forward") -> int:
        """Floating-point operations of all products for ``tokens``: router, experts, shared experts, last bias.

        Of the whole layer, over all devices; see :func:`mok_jax.flops`, also for ``direction``.

        Example:
          >>> Settings(8, 16, num_experts=4, num_experts_per_tok=2).flops(tokens=1)
          1600
        """
        tokens = operator.index(tokens)  # a device's int32 would overflow
        shared = self.num_shared_experts * (self.shared_intermediate_size or self.intermediate_size)
        columns = self.num_experts * (2 if self.use_bias else 1) + self.shared_expert_gate
        return (
            flops(tokens * self.num_experts_per_tok, self.hidden_size, self.intermediate_size, direction)
            + flops(tokens, self.hidden_size, shared, direction)
            + product_flops(tokens, self.hidden_size, columns, direction)
        )

    def _without_padding(self, init: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """``init`` for arrays of the experts, with zeros in the padding: seeds mean the same on every mesh."""

        def padded(key, shape, dtype):
            experts = init(key, (self.num_experts, *shape[1:]), dtype)
            return jnp.pad(experts, [(0, shape[0] - self.num_experts)] + [(0, 0)] * (len(shape) - 1))

        return padded

    def expert_bias_parameter(self) -> Parameter:
        """The bias of ``expert_bias=True``. Always f32: an update is far below the spacing of bf16 around 1."""
        return Parameter((self.num_experts,), (None,), jax.nn.initializers.zeros)

    def axis_rules(self) -> tuple[tuple[str, Any], ...]:
        """From logical axes to axes of the mesh, in order of precedence.

        These are the caller's (``flax.linen.logical_axis_rules``), then the package's for axes that no such rule names.
        """
        theirs = tuple(spmd.get_logical_axis_rules() or ())
        if self.mesh is None:
            return theirs
        named = {name for name, _ in theirs}
        ours = sharding.logical_axis_rules(self.mesh, self.expert_axis)
        return theirs + tuple(rule for rule in ours if rule[0] not in named)

    def partition_spec(self, axes: tuple[str | None, ...]) -> P:
        """The axes of the mesh for a parameter's logical ``axes``, as Linen reads rules.

        Of several rules for an axis the first counts whose mesh axes are still free in this parameter; where none is,
        the dimension is whole.
        """
        spec = logical_to_mesh_axes(axes, self.axis_rules())
        assert spec is not None
        return spec


def _arrays_of(kernel_init: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``kernel_init``, with a refusal of what would not be noticed until much later."""

    def checked(key, shape, dtype):
        kernel = kernel_init(key, shape, dtype)
        if not isinstance(kernel, jax.Array) or (kernel.shape, kernel.dtype) != (shape, jnp.dtype(dtype)):
            there = " ".join(str(getattr(kernel, name, None)) for name in ("dtype", "shape"))
            raise TypeError(
                f"kernel_init returns a {type(kernel).__name__} ({there}); it must return an array ({jnp.dtype(dtype)} "
                f"{shape}), and no box: the layer names its axes, and they are laid out by "
                "flax.core.spmd.logical_axis_rules."
            )
        return kernel

    return checked


def _for_each_expert(init: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``init`` of a matrix as one of ``[E, in, out]``, each expert with a key of its own."""

    def stacked(key, shape, dtype):
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return stacked

"""One training step: loss, gradients, perhaps of several parts of the batch in turn, and AdamW."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.transformer import Transformer

_WARMUP_FRACTION = 0.1


def make_optimizer(
    learning_rate: float, steps: int, clip_norm: float = 1.0
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW with warm-up and cosine decay; all but the norms' scales is decayed. Gradients are clipped to a norm."""
    warmup = max(1, int(_WARMUP_FRACTION * steps))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), end_value=learning_rate / 20
    )
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=_is_decayed)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw), schedule


def _is_decayed(params: nnx.State) -> nnx.State:
    # By name, not by dimension: stacked scales are a matrix as well.
    return nnx.map_state(lambda path, _: path[-1] != "scale", params)


def make_state(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[nnx.GraphDef, nnx.State]:
    """Splits model and optimizer, every array on the mesh: experts as they are sharded, the rest on all devices."""
    graph, state = nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))
    whole = NamedSharding(mesh, P())
    return graph, jax.tree.map(
        lambda a: a if getattr(a.sharding, "mesh", None) == mesh else jax.device_put(a, whole), state
    )


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte: ``f32 [B, S, 256], int32 [B, S] -> f32``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def compile_train_step(graph: nnx.GraphDef, state: nnx.State, crops: jax.Array, mesh: Mesh) -> Callable:
    """Compiles ``(state, int32 [A, B, S + 1]) -> (state, metrics)`` once; the state is donated and keeps its sharding,
    and all devices have the metrics. The gradient is the mean over ``A`` parts, one at a time.
    """

    def gradients_of(model, crop):
        def loss_function(model):
            out = model(crop[:, :-1])
            loss = next_byte_loss(out.logits, crop[:, 1:])
            metrics = {"loss": loss, "router_loss": out.router_loss, "expert_load": out.expert_load}
            return loss + out.router_loss, metrics

        (_, metrics), gradients = nnx.value_and_grad(loss_function, has_aux=True)(model)
        return gradients, metrics

    def mean_over_parts(model, crops):
        static, parameters = nnx.split(model)

        def of_part(crop):
            # Variables of their own: those of the model belong to the trace around this one.
            return gradients_of(nnx.merge(static, jax.tree.map(jnp.asarray, parameters)), crop)

        def add(sums, crop):
            return jax.tree.map(jnp.add, sums, of_part(crop)), None

        shapes = jax.eval_shape(of_part, crops[0])
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        (gradients, metrics), _ = jax.lax.scan(add, zeros, crops)
        means = {name: metrics[name] / len(crops) for name in ("loss", "router_loss")}
        return jax.tree.map(lambda g: g / len(crops), gradients), metrics | means

    def train_step(state, crops):
        model, optimizer = nnx.merge(graph, state)
        gradients, metrics = gradients_of(model, crops[0]) if len(crops) == 1 else mean_over_parts(model, crops)
        optimizer.update(model, gradients)
        model.balance(metrics["expert_load"])
        return nnx.state((model, optimizer)), metrics

    shardings = jax.tree.map(lambda a: a.sharding, state)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))
    return step.lower(state, crops).compile()

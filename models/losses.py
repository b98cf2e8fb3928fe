"""The command of the two ``flax_moe`` programs: trains for some steps and prints the loss of every tenth."""

from collections.abc import Callable, Iterator

from mok_jax.command import Parser, whole

_WHY_THEY_DIFFER = (
    "flax_moe and flax_moe_with_mok_jax print different losses: Linen draws initial parameters by their path, and the "
    "layer's lie one level deeper, under moe. With the same parameters both compute the same."
)


def main(module: str, description: str, train: Callable[[int], Iterator[float]]) -> None:
    """Does what the command line of ``python -m module`` says; ``train`` yields each step's loss, in nats per byte."""
    parser = Parser(f"python -m {module}", description=description.replace("`", ""))
    parser.add_argument("--steps", type=whole(1), default=100, metavar="N", help="training steps (%(default)s)")
    args = parser.parse_args()
    print(_WHY_THEY_DIFFER, flush=True)
    for step, loss in enumerate(train(args.steps)):
        if step % 10 == 0:
            print(f"step {step:4d}  loss {loss:.3f} nats per byte", flush=True)

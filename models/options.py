"""The command line of ``python -m models.train``."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from models import presets
from models.config import ModelConfig
from mok_jax.command import Parser, add_process_options, positive, whole

# Every field of the model's shape is an option of the same name.
MODEL_FIELDS = dataclasses.fields(ModelConfig)

_LARGEST_SEED = 2**32 - 1  # JAX makes the same key of larger ones as of smaller.
_OF_MODEL = {
    "preset": f"the layer of a published model; of {', '.join(presets.PRESETS)}",
    "num_layers": "blocks of attention and experts",
    "hidden_size": "width of the stream; a multiple of twice the number of heads",
    "num_heads": "attention heads",
    "intermediate_size": "width within one expert",
    "num_experts": "experts in each block",
    "num_experts_per_tok": "experts that each byte passes through",
    "score_function": "of the router: softmax, sigmoid or sqrtsoftplus",
    "aux_loss_coeff": "factor of the load-balancing loss; 0 leaves it out",
    "z_loss_coeff": "factor of the router's z-loss; 0 leaves it out",
    "rope_base": "wavelength of the slowest rotary position, over 2 pi, in bytes",
    "tie_embeddings": "use the embedding as the output matrix as well",
    "remat": "recompute activations in the backward, all but the experts: less memory, more time",
    "scan": "loop over stacked blocks, so that one is compiled however many there are",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line (``None``: of this process); what is wrong with it ends the process with one line."""
    parser = _parser()
    chosen, _ = parser.parse_known_args(arguments)
    if chosen.preset:
        parser.set_defaults(**presets.sizes(chosen.preset, chosen.scale))
    return parser.parse_args(arguments)


def _parser() -> Parser:
    parser = Parser(
        "python -m models.train",
        description="Trains a small Mixture-of-Experts language model over bytes and shows what its experts learned. "
        "Ctrl-C ends a run within seconds and keeps what was written. Defaults are in parentheses.",
    )
    _add_run(parser.add_argument_group("the run"))
    _add_machine(parser.add_argument_group("how it is computed"))
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--scale",
        choices=presets.SCALES,
        default="tiny",
        help="sizes that a preset comes with, where no option says another (%(default)s)",
    )
    for field in MODEL_FIELDS:
        text = f"{_OF_MODEL[field.name]} ({field.default if field.default != '' else 'none'})"
        if field.name == "preset":
            group.add_argument(_flag(field), choices=presets.PRESETS, default="", metavar="NAME", help=text)
        elif field.type is bool:
            group.add_argument(_flag(field), action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            group.add_argument(_flag(field), type=field.type, default=field.default, metavar="X", help=text)
    return parser


def _flag(field: dataclasses.Field) -> str:
    return "--" + field.name.replace("_", "-")


def _add_run(group: Any) -> None:
    group.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="UTF-8 text file, or a folder of them, to train on; a part of it is held out (the sources of Python's "
        "standard library)",
    )
    group.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="FOLDER",
        help="where metrics.jsonl, pictures and sample.txt are written; those of an earlier run are moved into "
        "earlier-1, earlier-2, ... inside (%(default)s)",
    )
    group.add_argument("--steps", type=whole(1), default=300, metavar="N", help="training steps (%(default)s)")
    group.add_argument(
        "--batch-size",
        type=whole(1),
        default=32,
        metavar="N",
        help="sequences in a step; a multiple of the number of devices (%(default)s)",
    )
    group.add_argument(
        "--sequence-length", type=whole(1), default=128, metavar="N", help="bytes in a sequence (%(default)s)"
    )
    group.add_argument(
        "--learning-rate",
        type=positive,
        default=3e-3,
        metavar="X",
        help="AdamW's at its peak, after a tenth of the steps; it decays to a twentieth (%(default)s)",
    )
    group.add_argument(
        "--log-every",
        type=whole(1),
        default=10,
        metavar="N",
        help="steps that make up one line of metrics.jsonl (%(default)s)",
    )
    group.add_argument(
        "--clip-norm", type=positive, default=1.0, metavar="X", help="norm that gradients are clipped to (%(default)s)"
    )
    group.add_argument(
        "--accumulate",
        type=whole(1),
        default=1,
        metavar="N",
        help="parts of a batch, computed one after the other for less memory (%(default)s)",
    )
    group.add_argument(
        "--evaluate-every",
        type=whole(0),
        default=0,
        metavar="N",
        help="steps between evaluations on held-out text; 0: only after the last (%(default)s)",
    )
    group.add_argument(
        "--checkpoint-every",
        type=whole(0),
        default=0,
        metavar="N",
        help="steps between checkpoints, which --resume goes on from; one more at the end; 0: none (%(default)s)",
    )
    group.add_argument(
        "--keep-checkpoints", type=whole(1), default=3, metavar="N", help="how many, the newest (%(default)s)"
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="write the metrics for TensorBoard, too, into tensorboard in --out; needs tensorboardX (off)",
    )
    group.add_argument(
        "--profile",
        type=whole(0),
        default=0,
        metavar="N",
        help="trace N steps, the first ten left out, into profile in --out (%(default)s)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out after its newest checkpoint, on as many devices as there are; begin anew "
        "where there is none (off)",
    )
    group.add_argument(
        "--seed",
        type=whole(0, _LARGEST_SEED),
        default=0,
        metavar="N",
        help=f"of parameters, crops and sample, from 0 to {_LARGEST_SEED} (%(default)s)",
    )


def _add_machine(group: Any) -> None:
    group.add_argument(
        "--implementation",
        choices=("megakernel", "xla", "reference"),
        help="of the expert step (the best that the devices have)",
    )
    group.add_argument(
        "--expert-parallelism",
        type=whole(1),
        metavar="N",
        help="devices that share one copy of the experts; a divisor of their number (all GPUs; on CPUs at most 4)",
    )
    group.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of activations (bfloat16 on GPUs, float32 on CPUs)"
    )
    group.add_argument(
        "--reserve-sms",
        type=whole(0),
        metavar="N",
        help="multiprocessors that the megakernel leaves to other programs on its GPU (0)",
    )
    add_process_options(group)
    group.add_argument(
        "--deterministic", action="store_true", help="the same bits in every run on one machine, on GPUs too (off)"
    )

"""``python -m mok_jax``: the command line; its commands are modules of their own."""

import sys

from mok_jax import plan, preflight, timeline, verify
from mok_jax.command import Parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a command (``None``: of this process' arguments); returns its exit status."""
    parser = Parser("python -m mok_jax", description="Mixture-of-Experts for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    plans = "whether a published layer fits a cluster, and what it takes of every GPU"
    verifies = "whether the megakernel's numbers are right on a shape and on this machine, and its bits always the same"
    looks = "what this machine has, and what keeps the megakernel from running on it"
    draws = "what every worker of a call did and waited for, as pictures and traces; recorded from the CPU executor"
    modules = (
        ("plan", plan, plans),
        ("preflight", preflight, looks),
        ("timeline", timeline, draws),
        ("verify", verify, verifies),
    )
    for name, module, text in modules:
        about = f"{text[0].upper()}{text[1:]}. Defaults are in parentheses."
        command = commands.add_parser(name, help=text, description=about)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())

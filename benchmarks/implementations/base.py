"""What a measured implementation is: a name, a reason why it cannot run here (if so), and a builder."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.problem import Problem, Tokens

# Names of results, as the check knows them.
FORWARD_RESULTS = ("y",)
BACKWARD_RESULTS = ("dx", "d_expert_weights", "d_wi_0", "d_wi_1", "d_wo")


@dataclasses.dataclass(frozen=True)
class Program:
    """Something that can be launched again and again, each time on the next of its inputs.

    Attributes:
      launch: starts launch number i and returns a handle, without waiting for the device.
      wait: returns when the launch of that handle is complete.
      peak_bytes: of one launch, arguments, results and temporaries together; None if not known.
      results: the named results of launch number i for the check; None if there is nothing to check.
      cycles: calls of the fused kernel that have completed, and clock cycles of all their CTAs; None if it has none.
      calls: of that kernel in one launch.
      queue: programs of one queue run one after another on the device; those of two would run beside each other.
    """

    launch: Callable[[int], Any]
    wait: Callable[[Any], None]
    peak_bytes: int | None = None
    results: Callable[[int], Mapping[str, Any]] | None = None
    cycles: Callable[[], tuple[int, int]] | None = None
    calls: int = 1
    queue: str = "xla"


# Built once for a shape and pass, bound to each routing's tokens.
Bind = Callable[[Sequence[Tokens]], Program]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An entry of the registry.

    Attributes:
      name: what records call it.
      why_not: the reason why it cannot run this problem here, or None.
      build: compiles it for a problem and a pass. May raise: that is reported, and ends nothing else.
    """

    name: str
    why_not: Callable[[Problem], str | None]
    build: Callable[[Problem, str], Bind]

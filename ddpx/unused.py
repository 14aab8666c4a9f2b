"""Parameters without a gradient: whether there may be any, which of them other ranks used, and what the error says.

Where there may be none, the error comes at the end of the very backward that left one out. Where there may, ranks count
by parameter how many used it, since one that nobody used keeps its `grad`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddpx.arena import Bucket, Slot, names_text
from ddpx.communicator import Communicator
from ddpx.errors import UnusedParameters
from ddpx.execute import Plan
from ddpx.options import Options

UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."


class Unused:
    """Of `slots`, those without a gradient. Constructing it is a collective."""

    def __init__(self, slots: Sequence[Slot], communicator: Communicator, options: Options) -> None:
        self.allowed = False
        self.static = options.static
        self.graph_changed = False  # where they are allowed: whether they have not always been those of the first round
        self._slots = slots
        self._communicator = communicator
        self._rank = communicator.group.rank
        self._first: set[int] | None = None  # those of the first round
        self._used: tuple[Tensor, Plan] | None = None  # by parameter, how many ranks used it; and what adds that up
        if options.find_unused:
            self.allow()

    def allow(self) -> None:
        """From here on parameters may go without a gradient. A collective."""
        self.allowed = True
        if self._used is None and self._communicator.group.world_size > 1:
            used = self._communicator.empty(len(self._slots), torch.int32)
            self._used = (used, self._communicator.plan_all_reduce(used))

    def check(self, unused: Sequence[Slot], buckets: Sequence[Bucket]) -> None:
        """Raise UnusedParameters where this rank's backward must not have left out `unused`."""
        if self.allowed:
            self._compare_with_first(unused)
        elif unused:
            raise UnusedParameters(self._text(unused, buckets))

    def _compare_with_first(self, unused: Sequence[Slot]) -> None:
        """With a static graph, each rank's parameters without a gradient stay the same."""
        now = {slot.index for slot in unused}
        if self._first is None:
            self._first = now
        self.graph_changed |= now != self._first
        if not self.static or now == self._first:
            return
        first, self._first = self._first, None  # after the error, the next round is a first one
        if now - first:
            raise UnusedParameters(
                f"{UNFINISHED} This error indicates that your training graph has changed in this iteration, e.g., one "
                "parameter is used in first iteration, but then got unused in the second iteration. this is not "
                f"compatible with static_graph set to True.\n{self._without_text(unused)}"
            )
        names = [self._slots[index].name for index in sorted(first - now)]
        raise UnusedParameters(
            "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
            "but then got used in the second iteration. this is not compatible with static_graph set to True. "
            f"On rank {self._rank} it is {names_text(names)}."
        )

    def used_anywhere(self, used: Sequence[Slot], run: Callable[[Callable[[], None]], None]) -> set[int]:
        """Indices of the parameters that some rank used; `used` are this rank's. A collective: it has a plan `run`."""
        mine = {slot.index for slot in used}
        if self._used is None:
            return mine
        counts, plan = self._used
        counts.zero_()
        counts[list(mine)] = 1
        run(plan.run)
        return set(counts.nonzero().flatten().tolist())

    def used_counts(self) -> Tensor:
        """By parameter: how many ranks had a gradient for it in the last round; this rank's alone where not allowed."""
        if self._used is None:
            return torch.tensor([int(slot.written) for slot in self._slots], dtype=torch.int32)
        return self._used[0].clone()

    def _text(self, unused: Sequence[Slot], buckets: Sequence[Bucket]) -> str:
        first = min((number for slot in unused for number in slot.buckets), default=0)
        total = len(buckets[first].slots) if buckets else len(self._slots)
        lacking = sum(not slot.written for slot in buckets[first].slots) if buckets else len(unused)
        return (
            f"{UNFINISHED} This error indicates that your module has parameters that were not used in producing loss. "
            f"It is found here at the end of the very backward that left them out, on rank {self._rank}: "
            f"bucket {first} still lacks {lacking} of {total} gradients. {self._without_text(unused)}\n"
            "Every parameter must reach the loss, by making sure all `forward` function outputs participate in "
            "calculating loss; or you can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to the wrapper."
        )

    def _without_text(self, unused: Sequence[Slot]) -> str:
        names = ", ".join(slot.name for slot in unused[:20]) + (", ..." if len(unused) > 20 else "")
        indices = " ".join(str(slot.index) for slot in unused[:20])
        return (
            f"Parameter indices which did not receive grad for rank {self._rank}: {indices}\n"
            f"Parameters which did not receive grad for rank {self._rank}: {names}"
        )

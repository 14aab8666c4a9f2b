"""Every rank's own times, on every rank: what it takes to say which rank the others wait for, and in which phase.

Each rank measures its own phases; after each round a small plan lets all ranks see all of them. It runs on the
communication stream beside whatever comes after backward, and is awaited when the next epoch, or a reader, needs it.
Waiting for others is in none of the phases, so the rank that is slow is the one whose phase is long.
"""

import contextlib

import torch

from ddpx.communicator import Communicator
from ddpx.errors import DeadlineExceeded, PeerFailed, PeerLost
from ddpx.stats import PHASES, PhaseTimes
from ddpx.stream import Pending


class PhaseBoard:
    """Every rank's phases of the last round, on every rank. Constructing it is a collective; so is `share`."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        world_size = communicator.group.world_size
        self._rows = communicator.empty(world_size * len(PHASES), torch.float64)
        self._plan = communicator.plan_all_reduce(self._rows)
        self._pending: Pending | None = None
        self._known = False

    def share(self, mine: PhaseTimes) -> None:
        """Send my phases on their way, in the epoch of the round that has just ended."""
        self._rows.zero_()
        begin = self._communicator.group.rank * len(PHASES)
        self._rows[begin : begin + len(PHASES)] = torch.tensor(
            [mine.input_s, mine.forward_s, mine.backward_s], dtype=torch.float64
        )
        self._pending = self._communicator.start(self._plan.run)
        self._known = True

    def settle(self) -> None:
        """Wait for what is under way, before the next epoch begins. If a peer failed, that epoch will say so itself.

        Raises DeadlineExceeded for a peer that did not come: waiting for it once is enough.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._known = False
            with contextlib.suppress(PeerLost, PeerFailed):
                self._communicator.wait(pending)
                self._known = True

    def forget(self) -> None:
        """A round failed, and what was under way with it."""
        self._pending = None
        self._known = False

    def read(self) -> list[PhaseTimes]:
        """All ranks' phases, in rank order; empty before the first round, and when a peer left meanwhile."""
        with contextlib.suppress(DeadlineExceeded):
            self.settle()
        if not self._known:
            return []
        return [PhaseTimes(*row) for row in self._rows.view(-1, len(PHASES)).tolist()]

"""Uneven inputs: ranks that have run out of batches shadow what the others still do.

torch's `Join` context counts who is left, before every forward. Then, in an epoch of our own, each rank tells what its
forward will bring (see the flags); ranks without inputs share the same buffers and run the same round with zeros.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from ddpx.buffers import broadcast
from ddpx.transport import IN_FORWARD

if TYPE_CHECKING:
    from ddpx.data_parallel import DDPX

IN_JOIN = 3 << 32  # an epoch in which ranks exchange flags
ACTIVE, BUFFERS, BACKWARD, COUNTS, LAST = 1, 2, 4, 8, 16


class UnevenInputs:
    """What one wrapper needs inside a join context. Constructing it is a collective."""

    def __init__(self, model: "DDPX", divide_by_initial_world_size: bool) -> None:
        communicator = model.reducer.communicator
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self._model = model
        self._flags = communicator.empty(communicator.group.world_size, torch.int32)
        self._plan = communicator.plan_all_reduce(self._flags)

    def _exchange(self, mine: int) -> list[int]:
        """Every rank's flags, in rank order."""
        reducer = self._model.reducer
        reducer.enter(IN_JOIN)
        self._flags.zero_()
        self._flags[reducer.rank] = mine
        reducer.run_in_epoch(self._plan.run)
        return self._flags.tolist()

    def announce_forward(self, buffers: bool, backward: bool, counts: bool) -> int:
        """An active rank is about to run a forward. Returns the rank whose buffers count."""
        work = Join.notify_join_context(self._model)
        if work is not None:
            work.wait()
        flags = self._exchange(ACTIVE | BUFFERS * buffers | BACKWARD * backward | COUNTS * counts)
        if not self.divide_by_initial_world_size:
            self._model.reducer.set_divisor(sum(flag & ACTIVE for flag in flags))
        return _first(flags, ACTIVE)

    def shadow_forward(self) -> None:
        """This rank has no inputs left: run what the active ranks announce."""
        reducer = self._model.reducer
        flags = self._exchange(0)
        if any(flag & BUFFERS for flag in flags):
            self._model.share_buffers(_first(flags, ACTIVE))
        if any(flag & COUNTS for flag in flags):
            reducer.forwards += 1
        if any(flag & BACKWARD for flag in flags):
            reducer.shadow()

    def adopt_final_model(self, is_last_joiner: bool) -> None:
        """The model of a rank that trained to the end, for everybody."""
        flags = self._exchange(LAST * is_last_joiner)
        root = max(rank for rank, flag in enumerate(flags) if flag & LAST)
        self._model._authoritative_rank = root
        reducer = self._model.reducer
        reducer.enter(IN_FORWARD)
        broadcast(reducer.communicator, self._model.shared_tensors(buffers=self._model.forward_sync_buffers), root)
        reducer.forwards = 0
        reducer.set_divisor(reducer.communicator.group.world_size)

    def close(self) -> None:
        self._model.reducer.communicator.release(self._flags)


class DDPXJoinHook(JoinHook):
    """What torch's Join calls on a rank without inputs."""

    def __init__(self, model: "DDPX", divide_by_initial_world_size: bool) -> None:
        self._model = model
        model._uneven = UnevenInputs(model, divide_by_initial_world_size)
        model.reducer.joining = True

    def main_hook(self) -> None:
        assert self._model._uneven is not None
        self._model._uneven.shadow_forward()

    def post_hook(self, is_last_joiner: bool) -> None:
        assert self._model._uneven is not None
        self._model._uneven.adopt_final_model(is_last_joiner)
        leave(self._model)


def leave(model: "DDPX") -> None:
    """End of a join context: forwards are ordinary ones again."""
    if model._uneven is not None:
        model._uneven.close()
    model._uneven = None
    model.reducer.joining = False
    model.reducer.set_divisor(model.reducer.communicator.group.world_size)
    model._join_config = _JoinConfig.construct_disabled_join_config()


class JoinContext(Join):
    """torch's Join for one wrapper; it leaves the join mode also when the body raised."""

    def __init__(self, model: "DDPX", **options: Any) -> None:
        self._model = model
        super().__init__([model], **options)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        try:
            super().__exit__(kind, value, traceback)
        finally:
            leave(self._model)


def can_join() -> bool:
    """Whether there is a group whose ranks could have uneven inputs."""
    return dist.is_available() and dist.is_initialized()


def _first(flags: list[int], wanted: int) -> int:
    return next((rank for rank, flag in enumerate(flags) if flag & wanted), 0)

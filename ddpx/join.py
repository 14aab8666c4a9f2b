"""Uneven inputs: ranks that have run out of batches shadow what the others still do.

Before each collective of a step (sharing buffers, or a round of gradients) ranks exchange flags in an epoch of its own:
who still has inputs, and what comes. Those without share the same buffers, and run the same round with zeros. So a
forward that is dropped, or accumulates under no_sync(), needs nobody. Accumulate that way: a second synchronised
backward before zero_grad() would average the first one's mean again, with the zeros of those who have left.

Inside torch's own `Join`, which counts forwards for several joinables together, a forward tells at once what it brings.

Note: leaving. Whoever leaves `join()` by an exception says so in the next epoch, and all others, who hear of it in
whatever they wait for there, leave as well without another word. So all ranks have then entered equally many epochs.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from ddpx.buffers import broadcast
from ddpx.errors import Mismatch
from ddpx.transport import IN_FORWARD, IN_JOIN

if TYPE_CHECKING:
    from ddpx.data_parallel import DDPX

ACTIVE, BUFFERS, BACKWARD, LAST = 1, 2, 4, 8
WORDS = {BUFFERS: "a training forward, sharing buffers", BACKWARD: "a backward", BUFFERS | BACKWARD: "a step"}
LEFT = "left join() by an exception"


class UnevenInputs:
    """What one wrapper needs inside a join context. Constructing it is a collective."""

    def __init__(self, model: "DDPX", divide_by_initial_world_size: bool) -> None:
        communicator = model.reducer.communicator
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.is_own = False  # in our context, not torch's
        self.throws = False  # on all ranks, once one has no inputs left
        self._model = model
        self._flags = communicator.empty(communicator.group.world_size, torch.int32)
        self._plan = communicator.plan_all_reduce(self._flags)

    def _exchange(self, mine: int) -> list[int]:
        """Every rank's flags, in rank order."""
        reducer = self._model.reducer
        reducer.enter(IN_JOIN)
        try:
            self._flags.zero_()
            self._flags[reducer.rank] = mine
            reducer.run_in_epoch(self._plan.run)
        except BaseException as error:
            reducer.fail_in_epoch(error)
            raise
        return self._flags.tolist()

    def _announce(self, coming: int) -> int:
        """This active rank is about to do what the flags say. Returns the rank whose buffers count."""
        flags = self._exchange(ACTIVE | coming)
        active = {rank: flag & ~ACTIVE for rank, flag in enumerate(flags) if flag & ACTIVE}
        if len(set(active.values())) > 1:
            told = ", ".join(f"rank {rank}: {WORDS.get(what, 'no collective')}" for rank, what in active.items())
            raise Mismatch(f"inside join(), ranks with inputs do not do the same things in the same order ({told}).")
        if self.throws and len(active) < len(flags):
            raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        if not self.divide_by_initial_world_size:
            self._model.reducer.set_divisor(len(active))
        return min(active)

    def before_forward(self, buffers: bool, backward: bool) -> int:
        """An active rank is about to run a forward. Returns the rank whose buffers count."""
        if self.is_own:
            return self._announce(BUFFERS) if buffers else 0
        work = Join.notify_join_context(self._model)
        root = self._announce(BUFFERS * buffers | BACKWARD * backward)
        if work is not None:
            work.wait()
        return root

    def before_round(self) -> None:
        """An active rank is about to reduce gradients."""
        self._announce(BACKWARD)

    def shadow(self, is_last: bool = False) -> list[int]:
        """This rank has no inputs left: run what the active ranks announce. Returns everybody's flags."""
        flags = self._exchange(LAST * is_last)
        if self.throws and any(flag & ACTIVE for flag in flags):
            raise RuntimeError(f"Rank {self._model.reducer.rank} exhausted all inputs.")
        if not self.divide_by_initial_world_size:
            self._model.reducer.set_divisor(max(1, sum(flag & ACTIVE for flag in flags)))
        if any(flag & BUFFERS for flag in flags):
            self._model.share_buffers(next(rank for rank, flag in enumerate(flags) if flag & ACTIVE))
        if any(flag & BACKWARD for flag in flags):
            self._model.reducer.shadow()
        return flags

    def shadow_to_the_end(self) -> None:
        """Shadow until no rank has inputs; then take over the model of one that trained to the end."""
        flags = self.shadow(is_last=True)
        while any(flag & ACTIVE for flag in flags):
            flags = self.shadow()
        self._adopt_model_of(flags)

    def adopt_final_model(self, is_last_joiner: bool) -> None:
        """The model of a rank that trained to the end, for everybody."""
        self._adopt_model_of(self._exchange(LAST * is_last_joiner))

    def _adopt_model_of(self, flags: list[int]) -> None:
        root = max(rank for rank, flag in enumerate(flags) if flag & LAST)
        self._model._authoritative_rank = root
        reducer = self._model.reducer
        reducer.enter(IN_FORWARD)
        try:
            broadcast(reducer.communicator, self._model.shared_tensors(buffers=self._model.forward_sync_buffers), root)
        except BaseException as error:
            reducer.fail_in_epoch(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """The body raised here (see Note: leaving)."""
        if LEFT not in str(error):
            reducer = self._model.reducer
            reducer.fail_outside(f"rank {reducer.rank} {LEFT}: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._model.reducer.communicator.release(self._flags)


class DDPXJoinHook(JoinHook):
    """What torch's Join calls on a rank without inputs."""

    def __init__(self, model: "DDPX", divide_by_initial_world_size: bool) -> None:
        self._model = model
        leave(model)  # another context, that torch left by an exception
        model._uneven = UnevenInputs(model, divide_by_initial_world_size)
        model.reducer.joining = True

    def main_hook(self) -> None:
        assert self._model._uneven is not None
        self._model._uneven.shadow()

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
    model.reducer.before_round = None
    model.reducer.set_divisor(model.reducer.communicator.group.world_size)
    model._join_config = _JoinConfig.construct_disabled_join_config()


class JoinContext(Join):
    """torch's Join for one wrapper, on exchanges of our own: those end when a rank fails."""

    def __init__(self, model: "DDPX", throw_on_early_termination: bool, **options: Any) -> None:
        self._model = model
        super().__init__([model], throw_on_early_termination=throw_on_early_termination, **options)
        uneven = model._uneven
        assert uneven is not None
        if not self._enable:
            leave(model)
            return
        uneven.is_own, uneven.throws = True, throw_on_early_termination
        model.reducer.before_round = uneven.before_round

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        uneven = self._model._uneven
        if uneven is None:
            return
        try:
            if value is not None:
                uneven.abandon(value)
                return
            try:
                uneven.shadow_to_the_end()
            except BaseException as error:
                uneven.abandon(error)
                raise
        finally:
            leave(self._model)


def can_join() -> bool:
    """Whether there is a group whose ranks could have uneven inputs."""
    return dist.is_available() and dist.is_initialized()

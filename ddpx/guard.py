"""An optimizer must not step on gradients that only this rank has seen.

Gradients become local when a backward does not go through the wrapper's output, or ran under no_sync(). A hook that
torch calls before every optimizer step looks for them: one flag in the ordinary case.

A false alarm stops a program that is right, so what may have been reduced by hand is let pass: when any process group
of torch.distributed ran a collective since that backward, or the gradients are no longer a multiple of what it left
(clipping and unscaling make a multiple), or they are zero. So is a step with a closure, which makes gradients anew.
Replicas that drift apart all the same are found by ddpx.drift.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddpx.arena import Slot, names_text
from ddpx.errors import UnsynchronisedStep

if TYPE_CHECKING:
    from ddpx.reducer import Reducer

LocalSteps = Literal["error", "allow"]

SAMPLE = 32  # elements of gradients
SAME = 1e-3  # of two directions; scaling in bf16 rounds elements by 2^-9, which turns them by less than 1e-5


class Footprint:
    """What one local backward left behind, to see whether somebody has reduced it since."""

    def __init__(self) -> None:
        self._collectives = _collectives_run()
        self._samples: list[tuple[Slot, Tensor]] = []
        self._room = SAMPLE

    def add(self, slot: Slot) -> None:
        """A gradient that has just arrived: sampled while there is room."""
        if self._room > 0:
            sample = _sample_of(slot)
            self._samples.append((slot, sample))
            self._room -= sample.numel()

    def was_taken_in_hand(self) -> bool:
        """Whether gradients may have been reduced, or made anew, by something else than ddpx."""
        if _collectives_run() != self._collectives:
            return True
        then = torch.cat([sample for _, sample in self._samples])
        now = torch.cat([_sample_of(slot) for slot, _ in self._samples])
        if then.shape != now.shape:
            return True
        norms = float(then.norm() * now.norm())
        return norms > 0 and abs(float(then @ now)) < (1 - SAME) * norms


def _collectives_run() -> list[int]:
    """How many collectives each process group of this process has begun; empty where that cannot be told."""
    try:
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        return [group._get_sequence_number_for_group() for group in groups]
    except (AttributeError, RuntimeError):
        return []


def _sample_of(slot: Slot) -> Tensor:
    """Some elements of its gradient, as fp32; none of a sparse one."""
    grad = slot.param.grad
    if grad is None or grad.is_sparse:
        return torch.empty(0, device=slot.param.device)
    sample = grad.detach().reshape(-1)[:SAMPLE]
    if sample.is_complex():
        sample = torch.view_as_real(sample).reshape(-1)
    return sample.to(torch.float32, copy=True)


def guard_steps(reducer: "Reducer") -> RemovableHandle:
    """Watch every optimizer step of this process for gradients of `reducer` that are still local."""
    reducer.watches_steps = True
    return register_optimizer_step_pre_hook(_pre_step_hook(weakref.ref(reducer)))


def _pre_step_hook(reducer: "weakref.ref[Reducer]") -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        owner = reducer()
        if owner is not None:
            local = owner.local_now()
            makes_its_own = (args[1:] and args[1] is not None) or kwargs.get("closure") is not None
            if local and not makes_its_own:
                _check(owner, local, optimizer)

    return hook


def _is_nonzero(grad: Tensor) -> bool:
    return bool((grad.coalesce().values() if grad.is_sparse else grad).any())


def _check(reducer: "Reducer", local: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
    mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
    slots = [slot for slot in local if slot.param.grad is not None and id(slot.param) in mine]
    if not slots or reducer.was_taken_in_hand():
        return
    names = [slot.name for slot in slots if slot.param.grad is not None and _is_nonzero(slot.param.grad)]
    if names:
        reducer.refuse(
            UnsynchronisedStep(
                f"rank {reducer.rank}: {type(optimizer).__name__}.step() was about to use gradients that no backward "
                f"has reduced over the ranks: {names_text(names)}. They come from a backward under no_sync() or on the "
                "inner module, or the step is made before backward has ended. Let the last backward before the step go "
                "through the wrapper, or call ddpx.sync_grads(model); for steps inside backward use torch's "
                "_apply_optimizer_in_backward. If local steps are meant, pass local_steps='allow'."
            )
        )

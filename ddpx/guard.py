"""An optimizer must not step on gradients that only this rank has seen.

Gradients become local when a backward does not go through the wrapper's output, or ran under no_sync(). A hook that
torch calls before every optimizer step looks for them: one flag in the ordinary case.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddpx.arena import Slot, names_text
from ddpx.errors import UnsynchronisedStep

if TYPE_CHECKING:
    from ddpx.reducer import Reducer

LocalSteps = Literal["error", "allow"]


def guard_steps(reducer: "Reducer") -> RemovableHandle:
    """Watch every optimizer step of this process for gradients of `reducer` that are still local."""
    return register_optimizer_step_pre_hook(_pre_step_hook(weakref.ref(reducer)))


def _pre_step_hook(reducer: "weakref.ref[Reducer]") -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        owner = reducer()
        if owner is not None:
            local = owner.local_now()
            if local:
                _check(owner, local, optimizer)

    return hook


def _check(reducer: "Reducer", local: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
    mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
    names = [slot.name for slot in local if slot.param.grad is not None and id(slot.param) in mine]
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

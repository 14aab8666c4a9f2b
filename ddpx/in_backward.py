"""Optimizers that torch's `_apply_optimizer_in_backward` has put on parameters: they step once gradients are reduced.

That function makes each parameter's optimizer step in the hook of its gradient, which here would be before the mean is
known. So its hooks are taken off, and the optimizers step at the end of the round; gradients are freed after, as there.
"""

from collections.abc import Sequence
from typing import Any

from torch.nn import Parameter


def take_over(parameters: Sequence[Parameter]) -> list[tuple[Parameter, Any]]:
    """Parameters with optimizers of their own, and these; their hooks are removed."""
    taken = [(param, vars(param)["_in_backward_optimizers"]) for param in parameters if _has_own(param)]
    if taken:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param, _ in taken:
            for handle in param_to_optim_hook_handle_map.get(param, []):
                handle.remove()
    return taken


def _has_own(param: Parameter) -> bool:
    return hasattr(param, "_in_backward_optimizers")


def step_all(taken: Sequence[tuple[Parameter, Any]]) -> None:
    for param, optimizers in taken:
        if param.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            param.grad = None

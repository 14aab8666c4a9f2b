"""What is asked of torch's autograd: word of outputs, gradients and ends of backwards, and where a backward leads.

Hooks that stay on parameters and outputs hold the reducer weakly, so that a dropped wrapper frees its arena.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpx.arena import Slot

if TYPE_CHECKING:
    from ddpx.reducer import Reducer


def gradient_hook(reducer: "weakref.ref[Reducer]", slot: Slot) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.on_gradient(slot, param)

    hook.ddpx_reducer = reducer  # type: ignore[attr-defined]
    return hook


def reducers_on(param: Parameter) -> "Iterator[Reducer]":
    """Whose gradient hooks `param` has."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        reducer = hook.ddpx_reducer() if hasattr(hook, "ddpx_reducer") else None
        if reducer is not None:
            yield reducer


def has_foreign_hook(param: Parameter) -> bool:
    """Whether somebody else's hook runs after ours on each gradient of `param`."""
    hooks = param._post_accumulate_grad_hooks
    return len(hooks) > 1 and any(not hasattr(hook, "ddpx_reducer") for hook in hooks.values())


def output_hook(reducer: "weakref.ref[Reducer]") -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.on_output_gradient()

    return hook


def watch(outputs: Iterable[Tensor], hook: Callable[[Tensor], None]) -> bool:
    """Have `hook` called when a backward comes to one of `outputs`. Whether there is one that can tell."""
    watched = [output for output in outputs if output.requires_grad and not output.is_leaf]
    for output in watched:
        output.register_hook(hook)
    return bool(watched)


def reached_of(parameters: Sequence[Parameter]) -> bool:
    """Whether the backward now running accumulates into one of them (autograd.grad does not)."""
    for param in parameters:
        if not param.requires_grad:
            continue
        with torch.enable_grad():
            node = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        try:
            if torch._C._will_engine_execute_node(node):  # type: ignore[arg-type]
                return True
        except RuntimeError:  # asked about a parameter that autograd.grad() was asked for
            continue
    return False


def when_backward_ends(ended: Callable[[bool], None]) -> None:
    """Have `ended` called when the backward now running is over: True where it came to its end, False where it raised.

    The engine calls what is queued when backward has ended; it drops it, uncalled, when backward raised.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_BackwardEnd(ended))


class _BackwardEnd:
    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._ended: Callable[[bool], None] | None = ended

    def __call__(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(True)

    def __del__(self) -> None:
        if self._ended is not None:
            self._ended(False)

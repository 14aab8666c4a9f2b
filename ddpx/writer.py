"""How a gradient gets into the arena: in one pass that divides it, after which `param.grad` is its place there.

A copy of few bytes costs a call more than bytes. So small gradients are only noted when they arrive, and written
together before a bucket launches: one call copies them all, and one a run of neighbours divides them.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ddpx.arena import Slot
from ddpx.errors import Error, NonFiniteGradient
from ddpx.options import NonFinite


class GradientWriter:
    """Writes this rank's gradients, divided by `divisor`, to the places their slots have.

    Raises Error for a gradient that must not be reduced: this rank has to tell its peers.
    """

    def __init__(self, rank: int, divisor: float, nonfinite: NonFinite) -> None:
        self.divisor = divisor
        self.collects_small = nonfinite == "ignore"  # else each is looked at by itself
        self.small: list[Slot] = []  # arrived, and to be written together
        self._rank = rank
        self._round = 0
        self._nonfinite = nonfinite

    def begin(self, number: int) -> None:
        """What is written from here on is of round `number`, counted from 1."""
        self._round = number
        self.small = []

    def write(self, slot: Slot, grad: Tensor | None) -> None:
        view = slot.view
        slot.written = True
        slot.local = False
        if view is None:
            self._keep_outside(slot, grad)
            return
        if grad is None:
            view.zero_()
            return
        if grad is view:
            view.div_(self.divisor)
        else:
            if grad.requires_grad:  # backward(create_graph=True)
                grad = grad.detach()
            if grad.is_sparse:
                grad = grad.to_dense()
            torch.div(grad, self.divisor, out=view)
            if slot.is_view:
                slot.param.grad = view
            else:
                slot.own_grad = grad
        if self._nonfinite != "ignore":
            self._look_for_nonfinite(slot, view)

    def write_small(self) -> None:
        """Write the small gradients that have arrived."""
        slots, self.small = self.small, []
        grads = [slot.param.grad for slot in slots]
        if torch.is_grad_enabled() or any(g is None or g is s.view or g.is_sparse for g, s in zip(grads, slots)):
            for slot, grad in zip(slots, grads, strict=True):
                self.write(slot, grad)
            return
        torch._foreach_copy_([slot.view for slot in slots], grads)  # type: ignore[arg-type, misc]
        if self.divisor != 1:
            for arena, begin, end in _runs(slots):
                arena[begin:end].div_(self.divisor)
        for slot in slots:
            slot.written = True
            slot.local = False
            slot.param.grad = slot.view

    def _keep_outside(self, slot: Slot, grad: Tensor | None) -> None:
        """A gradient that does not lie in the arena."""
        if slot.excluded and grad is not None:
            raise Error(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                f"but then got used: rank {self._rank}: parameter {slot.name} was unused on every rank in the first "
                "iteration, and skip_all_reduce_unused_params=True promises that it stays so."
            )
        slot.own_grad = grad

    def _look_for_nonfinite(self, slot: Slot, view: Tensor) -> None:
        if math.isfinite(view.sum(dtype=torch.float32 if view.element_size() < 4 else None).abs().item()):
            return
        bad = int((~torch.isfinite(view)).sum())
        if not bad:  # the sum alone overflowed
            return
        message = (
            f"rank {self._rank}: the gradient of {slot.name} has {bad} of {view.numel()} elements that are NaN or "
            f"infinite, before it was reduced, in synchronised backward {self._round}."
        )
        if self._nonfinite == "error":
            raise NonFiniteGradient(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _runs(slots: Sequence[Slot]) -> list[tuple[Tensor, int, int]]:
    """The slots' elements as (arena, begin, end), neighbours in one."""
    runs: list[tuple[Tensor, int, int]] = []
    for slot in slots:
        assert slot.arena is not None
        if runs and runs[-1][0] is slot.arena and runs[-1][2] == slot.begin:
            runs[-1] = (slot.arena, runs[-1][1], slot.end)
        else:
            runs.append((slot.arena, slot.begin, slot.end))
    return runs

"""Gradients in memory: slots in arenas, buckets over them, and the shapes between a parameter and flat memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpx.bucket import Item, Layout
from ddpx.communicator import Communicator, NothingToDo
from ddpx.execute import Plan
from ddpx.stream import Pending

SMALL_BYTES = 16 << 10


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter's place: where its gradient lies, and what has happened to it in this round."""

    index: int
    name: str
    param: Parameter
    sparse: bool = False  # gradients are sparse tensors: exchanged by rows, not in the arena
    excluded: bool = False  # promised to stay without a gradient on every rank
    view: Tensor | None = None  # shaped as the parameter, in the arena
    arena: Tensor | None = None
    begin: int = 0  # the slot is arena[begin:end], with the padding behind it
    end: int = 0
    is_small: bool = False  # copying it costs a call more than bytes, so it is copied together with others
    is_view: bool = True  # whether `param.grad` is to be `view` itself
    buckets: tuple[int, ...] = ()
    written: bool = False  # in the arena, scaled
    arrived: bool = False  # among those to be written
    nested: bool = False  # fired in a nested backward, so it may fire again
    local: bool = False  # has gradients that no round has reduced yet
    own_grad: Tensor | None = None  # the tensor to copy the mean to, where gradients are not views

    @property
    def in_arena(self) -> bool:
        return not (self.sparse or self.excluded)


@dataclass(slots=True, eq=False)
class Bucket:
    """A slice of an arena with its plan."""

    index: int
    flat: Tensor
    slots: tuple[Slot, ...]
    plan: Plan
    algorithm: str
    missing: int = 0
    pending: Pending | None = None
    ready_s: float = 0.0
    launched_s: float = 0.0
    waited_s: tuple[float, float] = (0.0, 0.0)


def items_of(slots: Sequence[Slot], wire_dtype: torch.dtype | None) -> list[Item]:
    """What the planner needs to know of each slot. Slots outside the arena count no elements."""
    return [
        Item(
            slot.name,
            _wire_numel(slot.param) if slot.in_arena else 0,
            wire(slot.param, wire_dtype).itemsize,
            _arena_name(slot, wire_dtype),
        )
        for slot in slots
    ]


def bind(
    layout: Layout,
    slots: Sequence[Slot],
    communicator: Communicator,
    wire_dtype: torch.dtype | None,
    want_views: bool,
) -> tuple[list[Bucket], dict[str, Tensor]]:
    """Allocate the arenas of a layout and point slots and buckets into them. A collective."""
    arenas: dict[str, Tensor] = {}
    for slot in slots:
        name = _arena_name(slot, wire_dtype)
        if name not in arenas:
            arenas[name] = communicator.empty(layout.arena_numel[name], wire(slot.param, wire_dtype))
    buckets_of = layout.buckets_of()
    ends = dict(layout.arena_numel)
    for index in sorted(range(len(slots)), key=lambda index: layout.offsets[index], reverse=True):
        slot = slots[index]
        if slot.in_arena and slot.param.numel():
            name = _arena_name(slot, wire_dtype)
            slot.arena, slot.begin, slot.end = arenas[name], layout.offsets[index], ends[name]
            ends[name] = slot.begin
    for slot in slots:
        slot.buckets = buckets_of.get(slot.index, ())
        slot.view, slot.is_small = None, False
        if slot.in_arena:
            _look_at(slot, arenas[_arena_name(slot, wire_dtype)], layout.offsets[slot.index], want_views)
    buckets = []
    for index, planned in enumerate(layout.buckets):
        flat = arenas[planned.arena][planned.begin : planned.end]
        members = tuple(slots[item] for item in planned.items)
        plan = communicator.plan_all_reduce(flat)
        buckets.append(Bucket(index, flat, members, plan, communicator.choose(flat.nbytes)))
    return buckets, arenas


def bind_alone(
    layout: Layout, slots: Sequence[Slot], device: torch.device, wire_dtype: torch.dtype | None, want_views: bool
) -> list[Bucket]:
    """Buckets of whole parameters for a communication hook, each in memory of its own, which no plan reduces."""
    for slot in slots:
        slot.buckets, slot.view, slot.arena, slot.is_small = (), None, None, False
        if slot.in_arena:
            _look_at(slot, torch.empty(0, dtype=wire(slot.param, wire_dtype), device=device), 0, want_views)
    buckets = []
    for index, planned in enumerate(layout.buckets):
        members = tuple(slots[item] for item in planned.items)
        flat = torch.zeros(planned.end - planned.begin, dtype=wire(members[0].param, wire_dtype), device=device)
        begin = 0
        for slot in members:
            slot.buckets, slot.arena, slot.begin, slot.end = (index,), flat, begin, begin + _wire_numel(slot.param)
            _look_at(slot, flat, begin, want_views)
            begin = slot.end
        buckets.append(Bucket(index, flat, members, NothingToDo(), "hook"))
    return buckets


def _look_at(slot: Slot, arena: Tensor, offset: int, want_views: bool) -> None:
    slot.view = gradient_view(arena, offset, slot.param)
    slot.is_view = want_views and slot.view.dtype == slot.param.dtype
    slot.is_small = slot.is_view and 0 < slot.param.nbytes <= SMALL_BYTES


def _arena_name(slot: Slot, wire_dtype: torch.dtype | None) -> str:
    return str(slot.param.dtype if slot.param.dtype.is_complex else wire(slot.param, wire_dtype))


def wire(param: Tensor, wire_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype a gradient travels in: complex numbers as pairs of real ones, others in `wire_dtype` where given."""
    if param.dtype.is_complex:
        return param.dtype.to_real()
    return wire_dtype if wire_dtype is not None and param.dtype.is_floating_point else param.dtype


def _wire_numel(param: Tensor) -> int:
    return param.numel() * (2 if param.dtype.is_complex else 1)


def gradient_view(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    """A tensor shaped and, where the parameter is dense, strided as `param`, on the arena's memory at `offset`.

    Not a view to autograd, so that `grad.detach_()` works on it.
    """
    stride = param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()
    if param.dtype.is_complex:
        offset //= 2
    base = flat.view(param.dtype) if param.dtype.is_complex else flat
    result = torch.empty(0, dtype=base.dtype, device=flat.device)
    if not param.numel():
        return torch.empty_like(param, requires_grad=False)
    return result.set_(base.untyped_storage(), base.storage_offset() + offset, param.shape, stride)


def is_dense(param: Tensor) -> bool:
    """Whether the parameter fills its memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(param.shape, param.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def names_text(names: Sequence[str], most: int = 4) -> str:
    """`a, b and 3 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

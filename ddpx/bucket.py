"""Where each gradient lies: parameters in an arena, arenas cut in buckets of a fixed size.

`plan_buckets` is pure: names, sizes and types in, a `Layout` out, the same on every rank. Gradients of one dtype lie in
one arena in the order they are expected to arrive; buckets are slices of it, whatever parameters they cut through. The
first bucket is small, so that communication starts early; the last is small, since nothing is left to hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGN_BYTES = 64  # parameters start on a cache line
BUCKET_ALIGN_BYTES = 128  # and no two buckets share a pair of them, which processors fetch together
SMALL_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter as the plan sees it; `numel` counts elements of `itemsize` bytes in the arena called `arena`."""

    name: str
    numel: int
    itemsize: int
    arena: str


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Elements [begin, end) of an arena, and the items (by number) that have elements there."""

    arena: str
    begin: int
    end: int
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """`offsets[i]` is where item i begins in its arena; buckets stand in launch order."""

    offsets: tuple[int, ...]
    arena_numel: dict[str, int]
    buckets: tuple[BucketPlan, ...]

    def buckets_of(self) -> dict[int, tuple[int, ...]]:
        """By item: the numbers of the buckets it has elements in."""
        found: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            for item in bucket.items:
                found.setdefault(item, []).append(number)
        return {item: tuple(numbers) for item, numbers in found.items()}


def plan_buckets(
    items: Sequence[Item],
    order: Sequence[int],  # item numbers in the order their gradients are expected
    bucket_bytes: int,
    first_bytes: int | None = None,  # None: SMALL_BUCKET_BYTES, or bucket_bytes where that is less
    one_per_item: bool = False,
    whole_items: bool = False,
    bytes_list: Sequence[int] = (),
) -> Layout:
    """Offsets and buckets. `one_per_item` gives each parameter a bucket of its own, whatever its size.

    `whole_items` cuts between items alone, and packs those of a bucket without gaps; a bucket is closed by the item
    with which it reaches its size. `bytes_list` gives the buckets of each arena their sizes, the last one repeating.
    """
    if sorted(order) != list(range(len(items))):
        raise ValueError(f"order must name each of {len(items)} items once, got {list(order)}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be above zero, got {bucket_bytes}")
    small = min(first_bytes or SMALL_BUCKET_BYTES, bucket_bytes)
    if any(nbytes <= 0 for nbytes in bytes_list):
        raise ValueError(f"sizes of buckets must be above zero, got {list(bytes_list)}")
    if whole_items:
        return _plan_whole(items, order, bytes_list or (small, bucket_bytes))
    offsets = [0] * len(items)
    arena_numel: dict[str, int] = {}
    members: dict[str, list[int]] = {}
    for number in order:
        item = items[number]
        align = BUCKET_ALIGN_BYTES if one_per_item else ALIGN_BYTES
        offsets[number] = _round_up(arena_numel.get(item.arena, 0), max(1, align // item.itemsize))
        arena_numel[item.arena] = offsets[number] + item.numel
        members.setdefault(item.arena, []).append(number)
    buckets = []
    for arena, numbers in members.items():
        itemsize = items[numbers[0]].itemsize
        if one_per_item:
            cuts = [offsets[number] for number in numbers if items[number].numel] + [arena_numel[arena]]
        elif bytes_list:
            cuts = _cut_by_list(arena_numel[arena], itemsize, bytes_list)
        else:
            cuts = cut(arena_numel[arena], itemsize, small, bucket_bytes)
        buckets += _fill(arena, cuts, numbers, items, offsets)
    return Layout(tuple(offsets), arena_numel, _in_launch_order(buckets, order))


def _in_launch_order(buckets: list[BucketPlan], order: Sequence[int]) -> tuple[BucketPlan, ...]:
    position = {number: place for place, number in enumerate(order)}
    return tuple(sorted(buckets, key=lambda bucket: max(position[item] for item in bucket.items)))


def _plan_whole(items: Sequence[Item], order: Sequence[int], sizes: Sequence[int]) -> Layout:
    """Buckets of whole items; the nth bucket of an arena is full at sizes[n] bytes, later ones at sizes[-1]."""
    offsets = [0] * len(items)
    arena_numel: dict[str, int] = {}
    buckets: list[BucketPlan] = []
    opened: dict[str, list[int]] = {}  # by arena: items of the bucket that is being filled
    count: dict[str, int] = {}

    def close(arena: str) -> None:
        members = opened.pop(arena)
        buckets.append(BucketPlan(arena, offsets[members[0]], arena_numel[arena], tuple(members)))
        count[arena] = count.get(arena, 0) + 1

    for number in order:
        item = items[number]
        begin = arena_numel.setdefault(item.arena, 0)
        if not item.numel:
            continue
        if item.arena not in opened:
            begin = _round_up(begin, max(1, BUCKET_ALIGN_BYTES // item.itemsize))
        offsets[number] = begin
        arena_numel[item.arena] = begin + item.numel
        members = opened.setdefault(item.arena, [])
        members.append(number)
        nbytes = (arena_numel[item.arena] - offsets[members[0]]) * item.itemsize
        if nbytes >= sizes[min(count.get(item.arena, 0), len(sizes) - 1)]:
            close(item.arena)
    for arena in list(opened):
        close(arena)
    return Layout(tuple(offsets), arena_numel, _in_launch_order(buckets, order))


def _cut_by_list(numel: int, itemsize: int, sizes: Sequence[int]) -> list[int]:
    """Where buckets of the given sizes begin and end; the last size repeats."""
    step = max(1, BUCKET_ALIGN_BYTES // itemsize)
    cuts = [0]
    while cuts[-1] < numel:
        nbytes = sizes[min(len(cuts) - 1, len(sizes) - 1)]
        cuts.append(min(numel, cuts[-1] + _round_up(max(1, nbytes // itemsize), step)))
    return cuts


def cut(numel: int, itemsize: int, small_bytes: int, bucket_bytes: int) -> list[int]:
    """Where buckets begin and end: small, then full ones, then what is left, then small."""
    step = max(1, BUCKET_ALIGN_BYTES // itemsize)
    small, full = (_round_up(max(1, nbytes // itemsize), step) for nbytes in (small_bytes, bucket_bytes))
    cuts = [0]
    if numel > 2 * small and small < full:
        cuts.append(small)
        last = (numel - small) // step * step
    else:
        last = numel
    while last - cuts[-1] > full:
        cuts.append(cuts[-1] + full)
    cuts += [last, numel]
    return sorted(set(cuts))


def _fill(
    arena: str, cuts: list[int], numbers: list[int], items: Sequence[Item], offsets: list[int]
) -> list[BucketPlan]:
    """Buckets between the cuts, each with the items that reach into it. `numbers` stand in arena order."""
    buckets = []
    first = 0
    for begin, end in pairwise(cuts):
        while first < len(numbers) and offsets[numbers[first]] + items[numbers[first]].numel <= begin:
            first += 1
        inside = []
        for number in numbers[first:]:
            if offsets[number] >= end:
                break
            if items[number].numel and offsets[number] + items[number].numel > begin:
                inside.append(number)
        if inside:
            buckets.append(BucketPlan(arena, begin, end, tuple(inside)))
    return buckets


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step

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
) -> Layout:
    """Offsets and buckets. `one_per_item` gives each parameter a bucket of its own, whatever its size."""
    if sorted(order) != list(range(len(items))):
        raise ValueError(f"order must name each of {len(items)} items once, got {list(order)}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be above zero, got {bucket_bytes}")
    small = min(first_bytes or SMALL_BUCKET_BYTES, bucket_bytes)
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
        else:
            cuts = cut(arena_numel[arena], itemsize, small, bucket_bytes)
        buckets += _fill(arena, cuts, numbers, items, offsets)
    position = {number: place for place, number in enumerate(order)}
    buckets.sort(key=lambda bucket: max(position[item] for item in bucket.items))
    return Layout(tuple(offsets), arena_numel, tuple(buckets))


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

"""Arithmetic on sets of time, held as sorted lists of half-open integer intervals.

An interval is `(start, end)` in nanoseconds and covers start <= t < end, so touching intervals join without a seam and
one of zero length covers nothing. Integers make sums exact: the four parts of a step add up to the step, not nearly.
Below, *disjoint* means sorted, non-empty and not touching: what `union` returns and what the rest expects and returns.

    compute   ██████████    ████
    comm          ████████████
    split     cccchhhhhheeeehhccggg      c compute only, h overlapped (hidden), e exposed communication, g gap
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Interval = tuple[int, int]


def join(ordered: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the disjoint union of intervals that come sorted by start; holds one interval at a time."""
    lo = hi = 0
    for start, end in ordered:
        if end <= start:
            continue
        if hi == lo:
            lo, hi = start, end
        elif start > hi:
            yield lo, hi
            lo, hi = start, end
        elif end > hi:
            hi = end
    if hi > lo:
        yield lo, hi


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The disjoint union of intervals in any order, nested, touching and empty ones included."""
    return list(join(sorted(intervals)))


def total(disjoint: Iterable[Interval]) -> int:
    """How much time a disjoint set covers."""
    return sum(end - start for start, end in disjoint)


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the time in both of two disjoint sets."""
    others = iter(b)
    other = next(others, None)
    for start, end in a:
        while other is not None and other[1] <= start:
            other = next(others, None)
        while other is not None and other[0] < end:
            yield max(start, other[0]), min(end, other[1])
            if other[1] > end:
                break
            other = next(others, None)


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the time in the disjoint set `a` and not in the disjoint set `b`."""
    others = iter(b)
    other = next(others, None)
    for start, end in a:
        while other is not None and other[1] <= start:
            other = next(others, None)
        while other is not None and other[0] < end:
            if other[0] > start:
                yield start, other[0]
            start = other[1]
            if start >= end:
                break
            other = next(others, None)
        if start < end:
            yield start, end


class Cutter:
    """Cuts a disjoint set into windows that come one after the other; holds one window at a time."""

    def __init__(self, disjoint: Iterable[Interval]) -> None:
        self._source = iter(disjoint)
        self._current = next(self._source, None)

    def take(self, lo: int, hi: int) -> list[Interval]:
        """The part of the set inside lo <= t < hi; windows must not overlap or go back."""
        inside: list[Interval] = []
        while self._current is not None and self._current[0] < hi:
            start, end = self._current
            if end > lo:
                inside.append((max(start, lo), min(end, hi)))
            if end > hi:
                break
            self._current = next(self._source, None)
        return inside


@dataclass(frozen=True, slots=True)
class Split:
    """A window of time in four parts that add up to it, all in nanoseconds."""

    compute_only: int
    overlapped: int
    exposed: int
    gap: int

    @property
    def duration(self) -> int:
        return self.compute_only + self.overlapped + self.exposed + self.gap

    def __add__(self, other: Split) -> Split:
        return Split(
            self.compute_only + other.compute_only,
            self.overlapped + other.overlapped,
            self.exposed + other.exposed,
            self.gap + other.gap,
        )


def split(window: Interval, compute: list[Interval], comm: list[Interval]) -> Split:
    """Split a window by what runs in it; `compute` and `comm` are disjoint sets inside the window."""
    overlapped = total(intersect(compute, comm))
    compute_only = total(compute) - overlapped
    exposed = total(comm) - overlapped
    return Split(compute_only, overlapped, exposed, window[1] - window[0] - compute_only - overlapped - exposed)

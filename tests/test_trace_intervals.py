"""Interval arithmetic against an oracle that paints every nanosecond of a short line."""

from hypothesis import given
from hypothesis import strategies as st

from ddpx.trace.intervals import Cutter, intersect, split, subtract, total, union

END = 24
interval = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))
intervals = st.lists(interval, max_size=12)
windows = st.lists(st.integers(0, END), max_size=8, unique=True).map(sorted)


def cut(some, steps):
    cutter = Cutter(union(some))
    return [cutter.take(lo, hi) for lo, hi in steps]


def painted(some):
    return {t for start, end in some for t in range(start, end)}


def assert_disjoint(some):
    assert all(start < end for start, end in some)
    assert all(first[1] < second[0] for first, second in zip(some, some[1:], strict=False))


@given(intervals)
def test_union_covers_what_its_intervals_cover(some):
    out = union(some)
    assert_disjoint(out)
    assert painted(out) == painted(some)
    assert total(out) == len(painted(some))


@given(intervals, intervals)
def test_intersect_and_subtract_part_a_set_in_two(some, others):
    a, b = union(some), union(others)
    both, rest = list(intersect(a, b)), list(subtract(a, b))
    assert painted(both) == painted(some) & painted(others)
    assert painted(rest) == painted(some) - painted(others)
    assert_disjoint(rest)
    assert total(both) + total(rest) == total(a)
    assert list(intersect(b, a)) == both


@given(intervals, windows)
def test_cutting_gives_each_window_its_own_part(some, edges):
    steps = list(zip(edges[0::2], edges[1::2], strict=False))
    parts = cut(some, steps)
    assert len(parts) == len(steps)
    for (lo, hi), part in zip(steps, parts, strict=True):
        assert painted(part) == painted(some) & set(range(lo, hi))
        assert all(lo <= start < end <= hi for start, end in part)


@given(intervals, windows)
def test_cutting_by_windows_that_touch_loses_nothing_between_them(some, edges):
    steps = list(zip(edges, edges[1:], strict=False))
    inside = painted([(edges[0], edges[-1])]) if edges else set()
    assert sum(total(part) for part in cut(some, steps)) == len(painted(some) & inside)


@given(intervals, intervals, interval)
def test_split_counts_every_nanosecond_once_and_sums_to_the_window(compute, comm, window):
    (c,), (m,) = cut(compute, [window]), cut(comm, [window])
    parts = split(window, c, m)
    line, busy, sent = painted([window]), painted(compute), painted(comm)
    assert parts.compute_only == len(line & busy - sent)
    assert parts.overlapped == len(line & busy & sent)
    assert parts.exposed == len(line & sent - busy)
    assert parts.gap == len(line - busy - sent)
    assert parts.duration == window[1] - window[0]


def test_nested_touching_and_empty_intervals():
    assert union([(5, 9), (6, 7), (9, 12), (3, 3), (12, 12), (20, 20)]) == [(5, 12)]
    assert union([]) == [] and union([(4, 4)]) == []
    assert list(intersect([(0, 10)], [(2, 3), (5, 12)])) == [(2, 3), (5, 10)]
    assert list(subtract([(0, 10)], [(0, 2), (4, 5), (9, 11)])) == [(2, 4), (5, 9)]
    assert cut([(0, 30)], [(5, 10), (10, 20), (25, 40)]) == [[(5, 10)], [(10, 20)], [(25, 30)]]

"""Layouts: every element of every parameter in exactly one bucket, small buckets at both ends, order as expected."""

import random

import pytest

from ddpx.bucket import (
    ALIGN_BYTES,
    BUCKET_ALIGN_BYTES,
    SMALL_BUCKET_BYTES,
    Item,
    Layout,
    cut,
    plan_buckets,
)

MIB = 1 << 20


def items_of(*numels: int, itemsize: int = 4, arena: str = "float32") -> list[Item]:
    return [Item(f"p{number}", numel, itemsize, arena) for number, numel in enumerate(numels)]


def plan(items: list[Item], bucket_bytes: int, **options) -> Layout:
    return plan_buckets(items, range(len(items)), bucket_bytes, **options)


def check(layout: Layout, items: list[Item]) -> None:
    """What holds for every layout, element by element."""
    for arena, numel in layout.arena_numel.items():
        buckets = [bucket for bucket in layout.buckets if bucket.arena == arena]
        spans = sorted((bucket.begin, bucket.end) for bucket in buckets)
        assert all(begin < end for begin, end in spans)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))
        covered = [False] * numel
        for number, item in enumerate(items):
            if item.arena != arena:
                continue
            begin, end = layout.offsets[number], layout.offsets[number] + item.numel
            assert not any(covered[begin:end])  # no two parameters share an element
            covered[begin:end] = [True] * item.numel
            holding = [bucket for bucket in buckets if bucket.begin < end and begin < bucket.end]
            if item.numel:
                assert holding[0].begin <= begin or len(holding) > 1
                assert sum(min(end, bucket.end) - max(begin, bucket.begin) for bucket in holding) == item.numel
            assert {id(bucket) for bucket in holding if item.numel} == {
                id(bucket) for bucket in buckets if number in bucket.items
            }


def test_buckets_are_slices_that_cover_every_parameter() -> None:
    items = items_of(1000, 10, 70000, 3, 128, 5000)
    for bucket_bytes in (1, 128, 4096, 100_000, MIB):
        check(plan(items, bucket_bytes), items)


def test_random_layouts_hold_every_element_once() -> None:
    for seed in range(200):
        generator = random.Random(seed)
        items = []
        for number in range(generator.randint(1, 12)):
            itemsize = generator.choice((1, 2, 4, 8))
            items.append(Item(f"p{number}", generator.choice((0, 1, 7, 33, 500)), itemsize, f"int{itemsize * 8}"))
        order = list(range(len(items)))
        generator.shuffle(order)
        bucket_bytes = generator.choice((1, 64, 130, 1024, 1 << 16))
        for one_per_item in (False, True):
            layout = plan_buckets(
                items, order, bucket_bytes, first_bytes=generator.choice((None, 64)), one_per_item=one_per_item
            )
            check(layout, items)


def test_a_parameter_larger_than_a_bucket_straddles_several() -> None:
    layout = plan(items_of(100, 10_000, 100), 8192, first_bytes=1024)
    assert len(layout.buckets_of()[1]) >= 4
    assert layout.buckets_of()[0] == (0,)


def test_the_first_and_the_last_bucket_are_small() -> None:
    layout = plan(items_of(*[MIB] * 100), 25 * MIB)  # 400 MiB of fp32
    sizes = [4 * (bucket.end - bucket.begin) for bucket in layout.buckets]
    assert sizes[0] == sizes[-1] == SMALL_BUCKET_BYTES
    assert set(sizes[1:-2]) == {25 * MIB}


def test_one_bucket_where_everything_fits() -> None:
    assert len(plan(items_of(100, 200, 300), 25 * MIB).buckets) == 1


def test_the_default_first_bucket_is_no_larger_than_the_others() -> None:
    layout = plan(items_of(*[1000] * 100), 4096)
    assert max(bucket.end - bucket.begin for bucket in layout.buckets) * 4 <= 4096


def test_parameters_start_on_a_cache_line_and_buckets_on_two() -> None:
    layout = plan(items_of(3, 5, 17, 4000, 9), 1000)
    assert all(offset * 4 % ALIGN_BYTES == 0 for offset in layout.offsets)
    assert all(bucket.begin * 4 % BUCKET_ALIGN_BYTES == 0 for bucket in layout.buckets)


def test_parameters_lie_in_the_order_given() -> None:
    items = items_of(50, 50, 50, 50)
    layout = plan_buckets(items, [2, 0, 3, 1], MIB)
    assert sorted(range(4), key=layout.offsets.__getitem__) == [2, 0, 3, 1]
    assert layout.buckets[0].items == (2, 0, 3, 1)


def test_buckets_stand_in_the_order_in_which_they_fill() -> None:
    items = [Item(f"p{number}", 64, 4 - 2 * (number % 2), ("float32", "bfloat16")[number % 2]) for number in range(40)]
    layout = plan(items, 512)
    last_arrival = [max(bucket.items) for bucket in layout.buckets]
    assert last_arrival == sorted(last_arrival)
    assert {bucket.arena for bucket in layout.buckets[:3]} == {"float32", "bfloat16"}


def test_each_dtype_has_an_arena() -> None:
    items = items_of(100, 200) + items_of(300, itemsize=2, arena="bfloat16")
    layout = plan(items, MIB)
    assert layout.arena_numel == {"float32": 112 + 200, "bfloat16": 300}  # 100 fp32 end inside a cache line
    assert [bucket.arena for bucket in layout.buckets] == ["float32", "bfloat16"]


def test_one_per_item_gives_each_parameter_its_own_bucket_whatever_the_size() -> None:
    items = items_of(1, 10, 100_000, 5)
    layout = plan(items, 4096, one_per_item=True)
    assert [bucket.items for bucket in layout.buckets] == [(0,), (1,), (2,), (3,)]
    assert layout.buckets[2].end - layout.buckets[2].begin >= 100_000


def test_parameters_without_elements_are_in_no_bucket() -> None:
    for one_per_item in (False, True):
        layout = plan(items_of(0, 5, 0, 7, 0), 64, one_per_item=one_per_item)
        assert sorted({item for bucket in layout.buckets for item in bucket.items}) == [1, 3]
        assert not plan(items_of(0), 64, one_per_item=one_per_item).buckets


def test_cuts_are_small_full_rest_small() -> None:
    assert cut(1000, itemsize=4, small_bytes=128, bucket_bytes=1280) == [0, 32, 352, 672, 960, 1000]
    assert cut(60, itemsize=4, small_bytes=128, bucket_bytes=1280) == [0, 60]
    assert cut(0, itemsize=4, small_bytes=128, bucket_bytes=1280) == [0]


def test_bad_orders_and_sizes_are_refused() -> None:
    items = items_of(5, 6)
    with pytest.raises(ValueError, match=r"order must name each of 2 items once, got \[0, 0\]"):
        plan_buckets(items, [0, 0], 64)
    with pytest.raises(ValueError, match="bucket_bytes must be above zero, got 0"):
        plan_buckets(items, [0, 1], 0)

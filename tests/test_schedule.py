"""Schedules as data: cutting, composing, drawing."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpx.algorithms import (
    all_to_all,
    build,
    chain,
    direct,
    double_tree,
    doubling,
    hierarchical,
    parameter_server,
    ring,
    scatter_gather,
    tree,
)
from ddpx.schedule import (
    Move,
    Schedule,
    beside,
    chunk_bounds,
    delay,
    grid,
    interleave,
    refine,
    remap,
    reverse,
    then,
    together,
    within,
)
from ddpx.verify import verify


@settings(max_examples=50)
@given(numel=st.integers(0, 2**40), chunks=st.integers(1, 500))
def test_chunks_are_contiguous_and_differ_by_at_most_one_element(numel, chunks):
    bounds = chunk_bounds(numel, chunks)
    assert len(bounds) == chunks
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:]))
    sizes = {hi - lo for lo, hi in bounds}
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50)
@given(numel=st.integers(0, 10_000), chunks=st.integers(1, 40), k=st.integers(1, 8))
def test_finer_cuts_keep_the_coarser_ones(numel, chunks, k):
    coarse, fine = chunk_bounds(numel, chunks), chunk_bounds(numel, chunks * k)
    assert coarse == [(fine[i * k][0], fine[i * k + k - 1][1]) for i in range(chunks)]


def test_fewer_elements_than_chunks_leave_empty_chunks():
    assert [hi - lo for lo, hi in chunk_bounds(2, 4)] == [0, 1, 0, 1]
    assert chunk_bounds(0, 3) == [(0, 0)] * 3


def test_moves_are_kept_in_order_whatever_order_they_are_given_in():
    moves = build("all_reduce", "ring", 4).moves
    shuffled = Schedule("ring", "all_reduce", 4, 4, moves[::-1])
    assert shuffled.moves == moves
    assert list(moves) == sorted(moves)
    assert shuffled == build("all_reduce", "ring", 4)
    assert hash(shuffled) == hash(build("all_reduce", "ring", 4))


def test_a_schedule_can_not_be_changed():
    schedule = build("all_reduce", "ring", 4)
    with pytest.raises(FrozenInstanceError):
        schedule.chunks = 5
    with pytest.raises(FrozenInstanceError):
        schedule.moves[0].step = 5


def test_by_step_has_an_entry_for_steps_in_which_nothing_moves():
    schedule = Schedule("gap", "broadcast", 3, 1, (Move(0, 1, (0,), 0, 1), Move(2, 2, (0,), 0, 1)))
    assert [len(moves) for moves in schedule.by_step()] == [1, 0, 1]
    assert schedule.steps == 3


def test_a_rank_sees_its_own_moves_only():
    schedule = build("all_reduce", "tree", 4)
    assert schedule.for_rank(3) == (Move(0, 2, (2, 3), 0, 1), Move(3, 3, (2,), 0, 1))
    every = {move for rank in range(4) for move in schedule.for_rank(rank)}
    assert every == set(schedule.moves)


def test_one_rank_has_nothing_to_do():
    schedule = build("all_reduce", "ring", 1)
    assert schedule.moves == () and schedule.steps == 0 and schedule.by_step() == []


def test_reduce_scatter_then_all_gather_is_an_all_reduce():
    both = then(ring.reduce_scatter(5), direct.all_gather(5))
    assert (both.collective, both.algorithm, both.steps) == ("all_reduce", "ring+direct", 5)
    verify(both)


def test_then_cuts_chunks_until_both_agree():
    both = then(chain.reduce(3, segments=2), chain.broadcast(3, segments=3))
    assert both.chunks == 6
    verify(both)


def test_then_wants_one_world_and_a_known_meaning():
    with pytest.raises(ValueError, match="3 ranks after ring over 4"):
        then(ring.reduce_scatter(4), ring.all_gather(3))
    with pytest.raises(ValueError, match="all_gather then all_gather"):
        then(ring.all_gather(4), ring.all_gather(4))


def test_remap_moves_a_schedule_to_other_ranks_of_a_larger_world():
    moved = remap(tree.broadcast(3), [5, 1, 4], 6)
    assert moved.world_size == 6 and moved.root == 5
    assert moved.moves == (Move(0, 4, (5,), 0, 1), Move(1, 1, (5,), 0, 1))
    for ranks in ([0, 1], [0, 1, 1], [0, 1, 6]):
        with pytest.raises(ValueError, match="3 different ranks below world_size 6"):
            remap(tree.broadcast(3), ranks, 6)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "doubling", "halving_doubling", "direct", "double_tree"])
def test_interleaving_keeps_an_all_reduce_right_and_adds_a_step_a_copy(algorithm, k):
    schedule = build("all_reduce", algorithm, 6)
    pipelined = interleave(schedule, k)
    assert pipelined.chunks == k * schedule.chunks
    assert pipelined.steps == schedule.steps + k - 1
    verify(pipelined)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "all_to_all"])
def test_interleaving_leaves_owners_their_chunks(collective):
    plain = build(collective, "direct", 4)
    pipelined = interleave(plain, 3, shift=2)
    verify(pipelined)
    assert pipelined.steps == plain.steps + 4
    with pytest.raises(ValueError, match="k=0"):
        interleave(plain, 0)


def test_copies_without_shift_run_at_once():
    assert interleave(build("all_reduce", "ring", 4), 2, shift=0).steps == 6


def test_a_broadcast_backwards_is_a_reduce_and_an_all_gather_backwards_a_reduce_scatter():
    verify(reverse(tree.broadcast(7, root=3)))
    backwards = reverse(ring.all_gather(5))
    assert backwards.collective == "reduce_scatter"
    verify(backwards)


def test_a_direct_all_gather_backwards_adds_in_rank_order():
    assert reverse(direct.all_gather(4)) == direct.reduce_scatter(4)


def test_only_copies_run_backwards():
    with pytest.raises(ValueError, match="not all_reduce"):
        reverse(build("all_reduce", "ring", 4))


def test_beside_puts_two_schedules_on_two_parts_of_a_buffer():
    both = beside(ring.all_reduce(4), tree.all_reduce(4))
    assert both.chunks == 5 and both.steps == 6
    verify(both)


def test_together_runs_two_groups_at_once():
    both = together(remap(ring.all_reduce(2), [0, 1], 5), remap(ring.all_reduce(3), [2, 3, 4], 5))
    assert both.chunks == 6
    assert {src // 2 for m in both.moves if m.dst < 2 for src in m.srcs} == {0}
    with pytest.raises(ValueError, match="one world"):
        together(ring.all_reduce(2), ring.all_reduce(3))


def test_refine_within_and_delay_change_one_thing_each():
    move = Move(0, 1, (0,), 0, 1)
    schedule = Schedule("one", "broadcast", 2, 1, (move,))
    assert refine(schedule, 3).moves == (Move(0, 1, (0,), 0, 3),)
    assert within(schedule, 2, 5).moves == (Move(0, 1, (0,), 2, 3),)
    assert delay(schedule, 4).moves == (Move(4, 1, (0,), 0, 1),)


def test_the_picture_of_a_ring():
    assert str(build("all_reduce", "ring", 3)) == (
        "ring all_reduce: 3 ranks, 3 chunks, 4 steps\n"
        "  step  rank 0   rank 1   rank 2\n"
        "     0  c2 += 2  c0 += 0  c1 += 1\n"
        "     1  c1 += 2  c2 += 0  c0 += 1\n"
        "     2  c0 = 2   c1 = 0   c2 = 1\n"
        "     3  c2 = 2   c0 = 0   c1 = 1"
    )


def test_a_large_picture_shows_the_marked_cell_and_says_what_it_leaves_out():
    text = grid(build("all_reduce", "ring", 100), mark=(150, 70))
    (marked,) = [line for line in text.splitlines() if line.startswith(">")]
    assert marked.split()[1] == "150" and "[c" in marked
    assert "ranks 64..75 of 100" in text and "steps 130..169 of 198" in text
    assert len(text.splitlines()) == 43


DRAWN = [
    (ring.all_reduce, (4,), {}),
    (tree.broadcast, (4,), {}),
    (tree.reduce, (4,), {}),
    (tree.all_reduce, (4,), {}),
    (double_tree.all_reduce, (3,), {"segments": 1}),
    (doubling.all_reduce, (4,), {}),
    (doubling.halving_doubling, (4,), {}),
    (doubling.doubling_all_gather, (4,), {}),
    (doubling.halving_reduce_scatter, (4,), {}),
    (doubling.circulant_all_gather, (3,), {}),
    (doubling.circulant_reduce_scatter, (3,), {}),
    (direct.all_reduce, (3,), {}),
    (parameter_server.all_reduce, (3,), {}),
    (chain.broadcast, (3,), {"segments": 2}),
    (scatter_gather.broadcast, (4,), {}),
    (all_to_all.pairwise, (3,), {}),
    (all_to_all.bruck, (4,), {}),
    (hierarchical, (4,), {"local_size": 2}),
]


@pytest.mark.parametrize("function, args, options", DRAWN, ids=lambda value: getattr(value, "__qualname__", None))
def test_what_a_docstring_draws_is_what_the_schedule_does(function, args, options):
    picture = str(function(*args, **options)).splitlines()[1:]
    lines = function.__doc__.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.split()[:2] == ["step", "rank"]]
    assert [line.strip() for line in lines[start : start + len(picture)]] == [line.strip() for line in picture]
    assert not lines[start + len(picture)].strip()

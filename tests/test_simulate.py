"""Simulated ranks: every algorithm against the definition of its collective, and the worked examples."""

import numpy as np
import pytest

from ddpx.algorithms import ALGORITHMS, build
from ddpx.cost import Fabric
from ddpx.schedule import Move, Schedule, chunk_bounds, interleave
from ddpx.simulate import OPERATIONS, bfloat16, effects, holdings, reference, show, simulate

EVERY = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]
SIZES = (0, 1, 7, 1000)


def inputs_for(collective, n, numel, dtype=np.int64):
    """Small whole numbers, so that sums in any order are equal; in all_gather shards of a buffer of `numel`."""
    rng = np.random.default_rng([n, numel])
    buffers = [rng.integers(-50, 50, numel).astype(dtype) for _ in range(n)]
    if collective == "all_gather":
        return [buffer[lo:hi] for buffer, (lo, hi) in zip(buffers, chunk_bounds(numel, n))]
    return buffers


def assert_same(outputs, expected):
    assert len(outputs) == len(expected)
    for rank, (out, due) in enumerate(zip(outputs, expected)):
        if due is None:
            assert out is None, f"rank {rank}"
        else:
            np.testing.assert_array_equal(out, due, err_msg=f"rank {rank}", strict=True)


@pytest.mark.parametrize("collective, algorithm", EVERY)
def test_every_algorithm_gives_what_its_collective_promises(collective, algorithm):
    for n in [*range(1, 10), 13, 16]:
        for numel in (*SIZES, n - 1, n):
            inputs = inputs_for(collective, n, numel)
            assert_same(simulate(build(collective, algorithm, n), inputs).outputs, reference(collective, inputs))


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_roots_other_than_0(collective):
    inputs = inputs_for(collective, 6, 20)
    for algorithm in ALGORITHMS[collective]:
        run = simulate(build(collective, algorithm, 6, root=4), inputs)
        assert_same(run.outputs, reference(collective, inputs, root=4))


@pytest.mark.parametrize("collective, algorithm", EVERY)
def test_pipelined_copies_give_the_same(collective, algorithm):
    for numel in (5, 1000):
        inputs = inputs_for(collective, 5, numel)
        schedule = interleave(build(collective, algorithm, 5), 3)
        assert_same(simulate(schedule, inputs).outputs, reference(collective, inputs))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_operations_and_dtypes(operation, dtype):
    inputs = [np.array([rank + 1, 2 * rank - 3, 1, 2], dtype) for rank in range(4)]
    for algorithm in ALGORITHMS["all_reduce"]:
        run = simulate(build("all_reduce", algorithm, 4), inputs, operation)
        assert_same(run.outputs, reference("all_reduce", inputs, operation))


def test_averaging_equals_numpys_mean():
    inputs = inputs_for("all_reduce", 8, 1000, np.float64)
    run = simulate(build("all_reduce", "ring", 8), inputs, "avg")
    for out in run.outputs:
        np.testing.assert_array_equal(out, np.mean(inputs, axis=0))


def test_any_shape_goes_in_and_comes_out():
    inputs = [np.full((3, 4), rank) for rank in range(5)]
    run = simulate(build("all_reduce", "ring", 5), inputs)
    assert all(out.shape == (3, 4) and (out == 10).all() for out in run.outputs)


def test_inputs_are_left_alone():
    inputs = inputs_for("all_reduce", 4, 10)
    before = [i.copy() for i in inputs]
    simulate(build("all_reduce", "doubling", 4), inputs)
    assert_same(inputs, before)


@pytest.mark.parametrize(
    "inputs, operation, text",
    [
        ([np.zeros(3)] * 3 + [np.zeros(4)], "sum", r"inputs differ in shape: rank 3 has \(4,\), rank 0 has \(3,\)"),
        (
            [np.zeros(3)] * 3 + [np.zeros(3, np.int32)],
            "sum",
            "inputs differ in dtype: rank 3 has int32, rank 0 has float64",
        ),
        ([np.zeros(3)] * 3, "sum", "4 ranks need 4 inputs, got 3"),
        ([np.zeros(3)] * 4, "mean", "unknown operation 'mean'; known: sum, avg"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs, operation, text):
    with pytest.raises(ValueError, match=text):
        simulate(build("all_reduce", "ring", 4), inputs, operation)


def test_shards_must_be_those_of_one_buffer():
    with pytest.raises(ValueError, match=r"all_gather of 5 elements needs shards of sizes \[2, 3\], got \[4, 1\]"):
        simulate(build("all_gather", "ring", 2), [np.zeros(4), np.zeros(1)])


def test_reading_what_is_not_there_and_leaving_a_rank_without_are_errors():
    reads_nothing = Schedule("mine", "broadcast", 3, 1, (Move(0, 2, (1,), 0, 1),))
    with pytest.raises(ValueError, match="step 0: rank 2 reads chunk 0 of rank 1, which holds none"):
        simulate(reads_nothing, [np.zeros(3)] * 3)
    with pytest.raises(ValueError, match="leaves rank 1 without chunk 0"):
        simulate(Schedule("mine", "broadcast", 2, 1, ()), [np.zeros(3)] * 2)


# ---- Four ranks with eight whole numbers each ------------------------------------------------------------------------

# Chunk 0 as given; the other chunks are chosen to sum to [21, 20], [17, 21] and [23, 8].
FOUR = [
    np.array([8, 6, 5, 5, 4, 5, 6, 2]),
    np.array([1, 8, 6, 5, 4, 5, 6, 2]),
    np.array([6, 5, 5, 5, 4, 6, 6, 2]),
    np.array([3, 8, 5, 5, 5, 5, 5, 2]),
]


def test_ring_reduce_scatter_leaves_chunk_r_plus_one_at_rank_r():
    run = simulate(build("all_reduce", "ring", 4), FOUR, keep=True)
    after_reduce_scatter = run.history[3]
    assert after_reduce_scatter[3][0].tolist() == [18, 27]
    assert after_reduce_scatter[0][1].tolist() == [21, 20]
    assert after_reduce_scatter[1][2].tolist() == [17, 21]
    assert after_reduce_scatter[2][3].tolist() == [23, 8]


def test_the_partial_sums_of_chunk_0_travel_from_rank_0_to_rank_3():
    history = simulate(build("all_reduce", "ring", 4), FOUR, keep=True).history
    travelling = [history[step][rank][0].tolist() for step, rank in enumerate(range(4))]
    assert travelling == [[8, 6], [9, 14], [15, 19], [18, 27]]


def test_after_the_all_gather_everybody_has_all_sums():
    run = simulate(build("all_reduce", "ring", 4), FOUR, keep=True)
    assert len(run.history) == 7
    for out in run.outputs:
        assert out.tolist() == [18, 27, 21, 20, 17, 21, 23, 8]


def test_a_nan_reaches_who_comes_after_it_in_the_ring_and_then_everybody():
    """Chunk 2 starts at rank 2 and travels 2, 3, 0, 1. A NaN put in at rank 3 is met by ranks 3, 0 and 1."""
    for source, held_after_reduce_scatter in ((2, {2, 3, 0, 1}), (3, {3, 0, 1}), (0, {0, 1}), (1, {1})):
        inputs = [i.astype(float) for i in FOUR]
        inputs[source][4] = np.nan
        history = simulate(build("all_reduce", "ring", 4), inputs, keep=True).history

        def with_nan(state):
            return {(rank, chunk) for rank in range(4) for chunk, v in state[rank].items() if np.isnan(v).any()}

        assert with_nan(history[3]) == {(rank, 2) for rank in held_after_reduce_scatter}
        # Of the chunks that ranks own by then, only that of rank 1 is spoilt.
        assert [np.isnan(history[3][rank][(rank + 1) % 4]).any() for rank in range(4)] == [False, True, False, False]
        assert with_nan(history[6]) == {(rank, 2) for rank in range(4)}


# ---- Rounding --------------------------------------------------------------------------------------------------------


def test_bfloat16_rounds_to_nearest_ties_to_even():
    values = np.array([1.0, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.3895314e38, np.inf], np.float32)
    expected = np.array([1.0, 1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -3.3895314e38, np.inf], np.float32)
    np.testing.assert_array_equal(bfloat16(values), expected)
    assert np.isnan(bfloat16(np.array([np.nan], np.float32)))[0]


def error_of(schedule: Schedule, inputs) -> float:
    """RMS error of rank 0's result, relative to the RMS of the exact sum."""
    exact = np.sum(np.asarray(inputs, np.float64), axis=0)
    out = simulate(schedule, inputs, rounding=bfloat16).outputs[0]
    return float(np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)))


def test_accumulating_in_fp32_beats_bf16_adds_by_the_factor_that_theory_says():
    """Rounding a sum of j terms of variance 1 makes an error of variance j u^2.

    One rounding at the end: n u^2. A ring rounds sums of 2, 3, ..., n terms: (n(n+1)/2 - 1) u^2. A tree rounds n / 2^l
    sums of 2^l terms at each of its log2 n levels: n log2 n u^2. The RMS errors differ by the roots of the quotients.
    """
    n, numel = 64, 16_384
    rng = np.random.default_rng(0)
    inputs = [bfloat16(rng.standard_normal(numel).astype(np.float32)) for _ in range(n)]
    once = error_of(build("all_reduce", "direct", n), inputs)
    ring = error_of(build("all_reduce", "ring", n), inputs)
    tree = error_of(build("all_reduce", "tree", n), inputs)
    assert ring / once == pytest.approx(np.sqrt((n * (n + 1) / 2 - 1) / n), rel=0.1)
    assert tree / once == pytest.approx(np.sqrt(np.log2(n)), rel=0.1)
    assert 1.4e-3 < once < 1.8e-3


# ---- Who holds what --------------------------------------------------------------------------------------------------


def test_holdings_follow_the_parts_step_by_step():
    states = list(holdings(build("all_reduce", "tree", 4)))
    assert [state[0][0] for state in states] == [(0,), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)]
    assert states[-1] == [{0: (0, 1, 2, 3)}] * 4
    gathered = list(holdings(build("all_gather", "direct", 3)))
    assert gathered[0] == [{0: (0,)}, {1: (1,)}, {2: (2,)}]
    assert gathered[1] == [{0: (0,), 1: (1,), 2: (2,)}] * 3


def test_holdings_show_what_is_added_twice():
    twice = Schedule("mine", "reduce", 2, 1, (Move(0, 0, (0, 1), 0, 1), Move(1, 0, (0, 1), 0, 1)))
    assert list(holdings(twice))[-1][0][0] == (0, 1, 1)


def test_the_text_of_a_broadcast():
    assert show(build("broadcast", "tree", 3, root=1)).splitlines() == [
        "at the start",
        "          c0",
        "  rank 0  -",
        "  rank 1  1",
        "  rank 2  -",
        "after step 0",
        "          c0",
        "  rank 0  1*",
        "  rank 1  1",
        "  rank 2  -",
        "after step 1",
        "          c0",
        "  rank 0  1",
        "  rank 1  1",
        "  rank 2  1*",
    ]


def test_the_text_of_a_ring_ends_with_all_everywhere():
    text = show(build("all_reduce", "ring", 4))
    assert text.count("after step") == 6
    assert "  rank 1  0+1*  1     1     1" in text
    assert [line.replace("*", "").split()[2:] for line in text.splitlines()[-4:]] == [["all"] * 4] * 4


# ---- Slow ranks and links --------------------------------------------------------------------------------------------

FABRIC = Fabric(10e-6, 1e-9, local_size=4)


def test_a_slow_rank_is_felt_by_every_algorithm_and_by_some_less():
    found = {effect.algorithm: effect for effect in effects(16, 1 << 20, FABRIC, {3: 5.0})}
    assert set(found) == set(ALGORITHMS["all_reduce"])
    assert all(1 < effect.factor <= 5.001 for effect in found.values())
    assert found["parameter_server"].factor < found["tree"].factor < found["ring"].factor
    factors = [effect.factor for effect in effects(16, 1 << 20, FABRIC, {3: 5.0})]
    assert factors == sorted(factors)


def test_a_slow_link_is_felt_only_by_those_who_use_it():
    found = {effect.algorithm: effect.factor for effect in effects(16, 1 << 20, FABRIC, slow_links={(3, 4): 5.0})}
    assert found["ring"] > 4.9
    assert found["tree"] == found["doubling"] == found["parameter_server"] == 1


def test_effects_on_other_collectives():
    assert {e.algorithm for e in effects(5, 1000, FABRIC, {0: 2.0}, collective="all_to_all")} == set(
        ALGORITHMS["all_to_all"]
    )


# ---- Scale -----------------------------------------------------------------------------------------------------------


def test_two_hundred_ranks_around_a_ring_in_full():
    inputs = inputs_for("all_reduce", 200, 450)
    assert_same(simulate(build("all_reduce", "ring", 200), inputs).outputs, reference("all_reduce", inputs))


@pytest.mark.parametrize("algorithm", ["tree", "doubling"])
def test_a_thousand_ranks_in_full(algorithm):
    inputs = inputs_for("all_reduce", 1000, 100)
    assert_same(simulate(build("all_reduce", algorithm, 1000), inputs).outputs, reference("all_reduce", inputs))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS["all_reduce"]) - {"tree", "doubling"}))
def test_a_thousand_ranks_in_full_by_every_algorithm(algorithm):
    inputs = inputs_for("all_reduce", 1000, 2500)
    assert_same(simulate(build("all_reduce", algorithm, 1000), inputs).outputs, reference("all_reduce", inputs))

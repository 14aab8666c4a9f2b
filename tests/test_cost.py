"""Counters against closed forms, times against the textbook, fits against what was put in."""

import math
import time
import tracemalloc

import pytest

from ddpx.algorithms import ALGORITHMS, build
from ddpx.algorithms.closed_form import FORMS, set_bits_below
from ddpx.cost import (
    SEGMENTS_ON_THE_WAY,
    Fabric,
    Sample,
    best_by_size,
    choose,
    closed_form,
    compare,
    count,
    crossover,
    fit,
    predict,
    slowdown,
    timeline,
)
from ddpx.schedule import Move, Schedule, interleave
from ddpx.transport.process_group import ProcessGroup

MB, GB = 10**6, 10**9
SLOW_NET = Fabric(alpha_s=10e-6, beta_s_per_byte=1 / (50 * GB))  # 10 us, 50 GB/s
EVERY = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]


def schedule_and_size(collective, algorithm, n, **options):
    """A schedule, elements that all its chunks divide, and the elements of one rank's buffer."""
    schedule = build(collective, algorithm, n, **options)
    numel = schedule.chunks * n * 8
    return schedule, numel, numel // n if collective == "all_to_all" else numel


# ---- Counters and closed forms are two ways to the same numbers ------------------------------------------------------


def test_every_algorithm_has_a_closed_form():
    assert {(c, a) for c, forms in FORMS.items() for a in forms} == set(EVERY)


@pytest.mark.parametrize("collective, algorithm", EVERY)
def test_counted_bytes_messages_and_steps_equal_the_closed_form(collective, algorithm):
    for n in [*range(1, 14), 16, 24, 32]:
        options = {"local_size": 4} if algorithm == "hierarchical" else {}
        if options and n > 4 and n % 4:
            continue
        schedule, numel, size = schedule_and_size(collective, algorithm, n, **options)
        counted = count(schedule, numel, itemsize=4)
        form = closed_form(collective, algorithm, n, size * 4, **options)
        assert counted.steps == form.steps
        assert max(counted.sent) == pytest.approx(form.sent, rel=1e-12)
        assert counted.busiest == pytest.approx(form.busiest, rel=1e-12)
        assert counted.total == pytest.approx(form.total, rel=1e-12)
        assert sum(counted.received) == counted.total
        chunk = numel * 4 / schedule.chunks
        added = sum((len(move.srcs) - 1) * (move.hi - move.lo) * chunk for move in schedule.moves)
        assert added == pytest.approx(form.added, rel=1e-12)
        assert form.whole == any(move.hi > move.lo + 1 for move in schedule.moves)
        messages = sum(counted.messages)
        assert messages <= form.posted if algorithm == "double_tree" else messages == form.posted


@pytest.mark.parametrize(
    "inner, outer", [("ring", "tree"), ("tree", "ring"), ("direct", "doubling"), ("doubling", "ring")]
)
def test_hierarchical_closed_form_for_other_algorithms_inside_and_between(inner, outer):
    for nodes, local_size in ((2, 2), (3, 4), (4, 8)):
        n, options = nodes * local_size, {"local_size": local_size, "inner": inner, "outer": outer}
        schedule, numel, _ = schedule_and_size("all_reduce", "hierarchical", n, **options)
        counted, form = count(schedule, numel), closed_form("all_reduce", "hierarchical", n, numel, **options)
        assert (counted.steps, counted.total, sum(counted.messages)) == (form.steps, form.total, form.posted)
        assert max(counted.sent) == form.sent


def test_hierarchical_closed_form_wants_equal_nodes():
    with pytest.raises(ValueError, match="10 is no multiple of local_size 4"):
        closed_form("all_reduce", "hierarchical", 10, 1000, local_size=4)


def test_uneven_chunks_are_counted_as_they_are():
    counted = count(build("all_reduce", "ring", 4), numel=10, itemsize=2)
    assert counted.total == 2 * 3 * 10 * 2
    assert sum(counted.sent) == sum(counted.received) == counted.total
    assert max(counted.sent) - min(counted.sent) <= 2 * 2


def test_empty_chunks_are_no_messages():
    assert count(build("all_reduce", "ring", 4), numel=0).messages == (0, 0, 0, 0)
    assert count(build("all_reduce", "ring", 4), numel=1).total == 2 * 3
    assert sum(count(build("all_reduce", "ring", 4), numel=1).messages) == 2 * 3


def test_pipelining_sends_the_same_bytes_in_more_steps():
    ring = build("all_reduce", "ring", 4)
    plain, pipelined = count(ring, 240), count(interleave(ring, 5), 240)
    assert plain.sent == pipelined.sent
    assert pipelined.steps == plain.steps + 4


def test_two_ranges_to_one_peer_in_one_step_are_one_message():
    schedule = Schedule("x", "broadcast", 2, 3, (Move(0, 1, (0,), 0, 1), Move(0, 1, (0,), 2, 3)))
    assert count(schedule, 3).messages == (1, 0)


def test_set_bits_below_is_what_it_says():
    for n in range(1, 70):
        assert set_bits_below(n) == sum(i.bit_count() for i in range(n))


# ---- Formulas of the textbook ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 1024])
def test_ring_sends_two_n_minus_one_over_n_of_the_buffer_in_two_n_minus_one_steps(n):
    form = closed_form("all_reduce", "ring", n, n * 1000)
    assert form.steps == 2 * (n - 1)
    assert form.sent == 2 * (n - 1) * 1000
    assert form.total == 2 * (n - 1) * n * 1000


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64, 1024])
def test_recursive_doubling_sends_log2_n_buffers_in_log2_n_steps(n):
    form = closed_form("all_reduce", "doubling", n, 1000)
    assert form.steps == math.log2(n)
    assert form.sent == 1000 * math.log2(n)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
def test_the_hub_of_a_parameter_server_moves_two_n_minus_one_buffers(n):
    assert closed_form("all_reduce", "parameter_server", n, 1000).busiest == 2 * (n - 1) * 1000


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_halving_doubling_sends_as_little_as_a_ring_in_two_log2_n_steps(n):
    form = closed_form("all_reduce", "halving_doubling", n, n * 1000)
    assert form.steps == 2 * math.log2(n)
    assert form.sent == closed_form("all_reduce", "ring", n, n * 1000).sent


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 100])
def test_circulant_is_as_good_for_other_numbers_of_ranks(n):
    form = closed_form("all_reduce", "circulant", n, n * 1000)
    assert form.steps == 2 * math.ceil(math.log2(n))
    assert form.sent == closed_form("all_reduce", "ring", n, n * 1000).sent
    assert form.sent < closed_form("all_reduce", "halving_doubling", n, n * 1000).sent


def test_eight_ranks_and_1024_doubles():
    """Ring 14 rounds and 114,688 bytes in all, recursive doubling 3 and 196,608, naive as many as the ring."""
    numel, itemsize = 1024, 8
    ring = count(build("all_reduce", "ring", 8), numel, itemsize)
    doubling = count(build("all_reduce", "doubling", 8), numel, itemsize)
    naive = count(build("all_reduce", "parameter_server", 8), numel, itemsize)
    assert (ring.steps, ring.total) == (14, 114_688)
    assert (doubling.steps, doubling.total) == (3, 196_608)
    assert naive.total == 114_688
    assert naive.busiest == 2 * 7 * numel * itemsize == naive.sent[0] + naive.received[0]


def test_four_ranks_and_eight_numbers_take_6_steps_and_12_numbers_sent_per_rank():
    ring = count(build("all_reduce", "ring", 4), 8)
    assert ring.steps == 6
    assert ring.sent == (12, 12, 12, 12)


def test_a_thousand_ranks_and_a_gigabyte():
    assert closed_form("all_reduce", "ring", 1024, GB).sent / GB == pytest.approx(1.9980, abs=5e-5)


def test_tree_broadcast_rounds_and_sends():
    for n, rounds in ((8, 3), (9, 4)):
        form = closed_form("broadcast", "tree", n, 1)
        assert (form.steps, form.total) == (rounds, n - 1)


@pytest.mark.parametrize(
    "nbytes, milliseconds",
    [
        (4e3, {"ring": 1.260, "tree": 0.121, "parameter_server": 1.270}),
        (1000 * MB, {"ring": 40.635, "tree": 240.120, "parameter_server": 2521.260}),
    ],
)
def test_64_ranks_at_10_us_and_50_gb_per_s(nbytes, milliseconds):
    """Tree: 2 log2 n rounds of the whole tensor. Server: 2(n-1) whole messages through one link, alpha paid in each."""
    for algorithm, expected in milliseconds.items():
        seconds = predict("all_reduce", algorithm, 64, nbytes, SLOW_NET).total_s
        assert round(seconds * 1e3, 3) == expected


def test_the_size_at_which_ring_and_tree_meet():
    """126 (alpha + S beta / 64) = 12 (alpha + S beta), so S = 114 alpha / ((12 - 126/64) beta) = 5.68 MB."""
    size = crossover("ring", "tree", 64, SLOW_NET)
    assert size == pytest.approx(114 * 10e-6 / ((12 - 126 / 64) / (50 * GB)), rel=1e-12)
    assert size / MB == pytest.approx(5.682, abs=1e-3)
    ring, tree = (predict("all_reduce", name, 64, size, SLOW_NET).total_s for name in ("ring", "tree"))
    assert ring == pytest.approx(tree, rel=1e-12)


def test_sixteen_ranks_and_two_gigabytes_around_a_ring():
    form = closed_form("all_reduce", "ring", 16, 2 * GB)
    assert form.sent == 3.75 * GB
    assert form.steps == 30
    assert {r.nbytes / r.messages for r in form.rounds} == {125 * MB}


def test_64_ranks_one_gigabyte_25_gb_per_s_and_5_us_are_a_matter_of_bandwidth():
    spent = predict("all_reduce", "ring", 64, GB, Fabric(5e-6, 1 / (25 * GB)))
    assert spent.latency_s * 1e3 == pytest.approx(0.63)
    assert spent.bandwidth_s * 1e3 == pytest.approx(78.75)
    assert spent.total_s * 1e3 == pytest.approx(79.38)
    assert spent.dominant == "bandwidth"
    assert predict("all_reduce", "ring", 64, 1000, Fabric(5e-6, 1 / (25 * GB))).dominant == "latency"
    assert predict("all_reduce", "ring", 4, GB, Fabric(0, 1e-12, gamma_s_per_byte=1e-9)).dominant == "compute"


def test_seven_billion_bf16_gradients_over_eight_ranks():
    nbytes = 6_738_149_376 * 2
    assert closed_form("all_reduce", "ring", 8, nbytes).sent / GB == pytest.approx(23.58, abs=0.005)
    seconds = predict("all_reduce", "ring", 8, nbytes, Fabric(0.0, 1 / (50 * GB))).total_s
    assert seconds == pytest.approx(0.47, abs=0.005)


# ---- Times from schedules --------------------------------------------------------------------------------------------

THREE_TERMS = Fabric(alpha_s=1e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=3e-10)


@pytest.mark.parametrize("collective, algorithm", [pair for pair in EVERY if pair[1] != "double_tree"])
def test_playing_a_schedule_takes_as_long_as_the_formula_says(collective, algorithm):
    for n in (1, 2, 3, 4, 6, 7, 8, 13, 16, 32):
        options = {"local_size": 2} if algorithm == "hierarchical" else {}
        if options and n > 2 and n % 2:
            continue
        schedule, numel, size = schedule_and_size(collective, algorithm, n, **options)
        played = max(timeline(schedule, numel, 4, THREE_TERMS))
        assert played == pytest.approx(predict(collective, algorithm, n, size * 4, THREE_TERMS, **options).total_s)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_the_formula_for_the_double_tree_is_an_upper_bound_good_to_a_quarter(collective):
    for n in (4, 8, 11, 13, 32, 100):
        for segments in (1, 4, 32):
            for per_chunk in (8, 100_000):
                schedule = build(collective, "double_tree", n, segments=segments)
                numel = schedule.chunks * per_chunk
                played = max(timeline(schedule, numel, 4, THREE_TERMS))
                formula = predict(collective, "double_tree", n, numel * 4, THREE_TERMS, segments=segments).total_s
                assert 0.75 < played / formula < 1 + 1e-9


def test_many_segments_give_the_double_tree_the_bandwidth_of_a_ring():
    only_bytes = Fabric(0.0, 1e-9)
    tree = predict("all_reduce", "double_tree", 1024, GB, only_bytes, segments=512).total_s
    ring = predict("all_reduce", "ring", 1024, GB, only_bytes).total_s
    assert tree < 1.03 * ring


def test_one_sided_reads_pay_alpha_once_a_step():
    fabric = Fabric(1e-5, 1e-9, concurrent=True)
    schedule, numel, size = schedule_and_size("all_reduce", "direct", 8)
    form = closed_form("all_reduce", "direct", 8, size)
    assert predict("all_reduce", "direct", 8, size, fabric).total_s == pytest.approx(2e-5 + form.sent * 1e-9)
    assert max(timeline(schedule, numel, 1, fabric)) == pytest.approx(2e-5 + form.sent * 1e-9)


def crowded(ranks_per_core, alpha=0.0, beta=0.0, gamma=0.0):
    return Fabric(alpha, beta, gamma, ranks_per_core=ranks_per_core)


def test_on_shared_processors_each_end_of_each_message_counts():
    """Four ranks send 6, 8 and 24 messages; two processors pay for two ends of each."""
    for algorithm, messages in (("tree", 6), ("doubling", 8), ("ring", 24), ("direct", 24)):
        assert predict("all_reduce", algorithm, 4, 0, crowded(2, alpha=1)).total_s == 2 * messages / 2
    for algorithm, steps in (("tree", 4), ("doubling", 2), ("ring", 6), ("direct", 2)):  # with processors in plenty
        assert predict("all_reduce", algorithm, 4, 0, crowded(1 / 16, alpha=1)).total_s == steps


def test_on_shared_processors_bytes_of_the_busiest_rank_count_and_a_segment_of_each_step():
    # In and out: 3 buffers of four ranks' ring, in 6 steps of a quarter; 4 of a tree, in 4 steps of a whole one.
    assert predict("all_reduce", "ring", 4, 1000, crowded(2, beta=1)).total_s == 3000 + 6 * 250 / 4
    assert predict("all_reduce", "tree", 4, 1000, crowded(2, beta=1)).total_s == 4000 + 4 * 1000 / 4
    # Circulant's messages are of several chunks, which aren't cut.
    assert predict("all_reduce", "circulant", 4, 1000, crowded(2, beta=1)).total_s == 3000 + 1500
    assert ProcessGroup.segments == SEGMENTS_ON_THE_WAY


def test_on_shared_processors_the_adds_of_all_ranks_count():
    """A tree of two ranks adds one buffer, doubling two."""
    for ranks_per_core, longer in ((2, 2), (1, 1), (0.5, 1)):  # a rank adds on one processor at a time
        assert predict("all_reduce", "tree", 2, 1000, crowded(ranks_per_core, gamma=1)).total_s == 500 * longer
        assert predict("all_reduce", "doubling", 2, 1000, crowded(ranks_per_core, gamma=1)).total_s == 1000 * longer


NODES = Fabric(
    alpha_s=20e-6, beta_s_per_byte=1 / (10 * GB), local_size=8, local_alpha_s=2e-6, local_beta_s_per_byte=1 / (200 * GB)
)


def test_hierarchical_time_is_the_sum_of_its_two_levels():
    """2[(p-1) a_l + (p-1)/p S b_l] + 2(m-1) a_n + 2(m-1)/m S/p b_n for rings inside and between."""
    n, p, m, size = 32, 8, 4, 32_000_000
    formula = 2 * (7 * 2e-6 + 7 / 8 * size / (200 * GB)) + 6 * 20e-6 + 6 / 4 * (size / 8) / (10 * GB)
    assert predict("all_reduce", "hierarchical", n, size, NODES, inner="ring").total_s == pytest.approx(formula)
    schedule = build("all_reduce", "hierarchical", n, local_size=p, inner="ring")
    assert max(timeline(schedule, size, 1, NODES)) == pytest.approx(formula)
    assert m * p == n


def test_on_nodes_a_flat_ring_runs_at_the_pace_of_the_slowest_link():
    size = 32_000_000
    flat, two_levels = (
        max(timeline(build("all_reduce", name, 32), size, 1, NODES)) for name in ("ring", "hierarchical")
    )
    assert flat == pytest.approx(predict("all_reduce", "ring", 32, size, NODES).total_s, rel=0.02)
    assert two_levels < flat / 4


def test_a_tree_crosses_between_nodes_at_its_longest_hops_only():
    predicted = predict("broadcast", "tree", 32, 1000, NODES)
    assert predicted.latency_s == pytest.approx(2 * 20e-6 + 3 * 2e-6)
    played = max(timeline(build("broadcast", "tree", 32), 1000, 1, NODES))
    assert played == pytest.approx(predicted.total_s)


def test_ranks_of_a_node_that_share_one_network_port_take_turns():
    """Between nodes 2(m-1)/m S b_n then passes one port, whatever the number of ranks in a node."""
    one_port = Fabric(0.0, 1 / (10 * GB), local_size=8, local_alpha_s=0.0, local_beta_s_per_byte=0.0, nics=1)
    size = 32_000_000
    predicted = predict("all_reduce", "hierarchical", 32, size, one_port).total_s
    assert predicted == pytest.approx(6 / 4 * size / (10 * GB))
    played = max(timeline(build("all_reduce", "hierarchical", 32), size, 1, one_port))
    assert played == pytest.approx(predicted)


# ---- Slow ranks and links --------------------------------------------------------------------------------------------


def test_a_slow_rank_slows_a_ring_by_its_factor_and_a_slow_link_too():
    ring = build("all_reduce", "ring", 8)
    assert slowdown(ring, 80_000, 4, SLOW_NET, {3: 5.0}) == pytest.approx(5, rel=0.05)
    assert slowdown(ring, 80_000, 4, SLOW_NET, slow_links={(3, 4): 5.0}) == pytest.approx(5, rel=0.05)
    assert slowdown(ring, 80_000, 4, SLOW_NET, slow_links={(4, 3): 5.0}) == 1


def test_a_slow_leaf_hurts_a_tree_less_than_a_slow_root():
    tree = build("all_reduce", "tree", 8)
    leaf, root = (slowdown(tree, 80_000, 4, SLOW_NET, {rank: 5.0}) for rank in (7, 0))
    assert leaf == pytest.approx((2 * 5 + 4) / 6)
    assert root == pytest.approx(5)


def test_nothing_is_slower_than_nothing():
    assert slowdown(build("all_reduce", "ring", 1), 10, 1, SLOW_NET, {0: 5.0}) == 1


# ---- Choosing --------------------------------------------------------------------------------------------------------


def test_small_buffers_choose_few_steps_and_large_ones_few_bytes():
    small, large = choose(64, 1000, SLOW_NET), choose(64, GB, SLOW_NET)
    assert small.algorithm == "doubling"
    form = closed_form("all_reduce", large.algorithm, 64, GB, **large.options)
    assert form.sent <= 2 * GB
    assert large.time.total_s < predict("all_reduce", "tree", 64, GB, SLOW_NET).total_s
    assert choose(64, GB, SLOW_NET, algorithms=["ring", "tree"]).algorithm == "ring"
    assert choose(64, 1000, SLOW_NET, algorithms=["ring", "tree"]).algorithm == "tree"


def test_hierarchical_is_compared_where_there_are_nodes():
    assert "hierarchical" in {choice.algorithm for choice in compare(32, GB, NODES)}
    assert "hierarchical" not in {choice.algorithm for choice in compare(32, GB, SLOW_NET)}
    assert "hierarchical" not in {choice.algorithm for choice in compare(12, GB, NODES)}
    assert choose(32, GB, NODES).algorithm == "hierarchical"
    with pytest.raises(ValueError, match="none of the algorithms can run on 32 ranks"):
        choose(32, GB, SLOW_NET, algorithms=["hierarchical"])


def test_more_segments_are_chosen_for_larger_buffers():
    few, many = (choose(64, size, SLOW_NET, algorithms=["double_tree"]).options["segments"] for size in (1e4, 1e9))
    assert few == 1 < 16 <= many


def test_algorithms_that_never_meet_have_no_crossover():
    assert crossover("ring", "parameter_server", 64, SLOW_NET) is None
    assert crossover("ring", "ring", 64, SLOW_NET) is None


def test_the_best_by_size_changes_exactly_at_the_crossovers():
    best = best_by_size(64, SLOW_NET, ["ring", "tree", "doubling", "parameter_server"])
    assert [name for _, name in best] == ["doubling", "ring"]
    assert best[0][0] == 0
    assert best[1][0] == pytest.approx(crossover("doubling", "ring", 64, SLOW_NET))
    for size, name in best:
        assert choose(64, size * 1.01 + 1, SLOW_NET, algorithms=["ring", "tree", "doubling"]).algorithm == name


@pytest.mark.parametrize(
    "call, text",
    [
        (("gather", "ring", 4, 8), "unknown collective 'gather'; known: all_reduce"),
        (("all_reduce", "rung", 4, 8), "unknown algorithm 'rung' for all_reduce; known: ring"),
        (("all_reduce", "ring", 0, 8), "world_size must be at least 1"),
        (("all_reduce", "ring", 4, -8), "nbytes at least 0"),
    ],
)
def test_closed_form_names_what_is_known(call, text):
    with pytest.raises(ValueError, match=text):
        closed_form(*call)


# ---- Fitting ---------------------------------------------------------------------------------------------------------


def measured(fabric: Fabric, noise: float = 0.0) -> list[Sample]:
    samples = []
    for algorithm in ("ring", "tree"):
        for i, power in enumerate(range(10, 29, 2)):
            seconds = predict("all_reduce", algorithm, 4, 2**power, fabric).total_s
            samples.append(Sample(algorithm, 4, 2**power, seconds * (1 + noise * (-1) ** i)))
    return samples


def test_fit_finds_the_links_that_made_the_measurements():
    made_by = Fabric(30e-6, 1 / (4 * GB))
    found = fit(measured(made_by))
    assert found.fabric.alpha_s == pytest.approx(30e-6)
    assert found.fabric.beta_s_per_byte == pytest.approx(1 / (4 * GB))
    assert found.rms < 1e-9


def test_fit_takes_the_price_of_adding_as_given():
    made_by = Fabric(30e-6, 1 / (4 * GB), gamma_s_per_byte=1e-10, concurrent=True)
    found = fit(measured(made_by), like=Fabric(0, 0, gamma_s_per_byte=1e-10, concurrent=True))
    assert found.rms < 1e-9
    assert found.fabric.beta_s_per_byte == pytest.approx(1 / (4 * GB))


def test_residuals_show_the_noise_that_was_put_in():
    found = fit(measured(Fabric(30e-6, 1 / (4 * GB)), noise=0.1))
    assert 0.05 < found.rms < 0.11
    assert abs(found.worst) == max(map(abs, found.residuals)) < 0.15
    assert found.fabric.alpha_s == pytest.approx(30e-6, rel=0.1)


def test_a_fit_is_never_negative():
    samples = [Sample("ring", 4, 1000, 1e-3), Sample("ring", 4, 100_000, 0.9e-3)]
    found = fit(samples)
    assert found.fabric.beta_s_per_byte == 0 and found.fabric.alpha_s > 0
    steep = [Sample("ring", 4, 1000, 1e-6), Sample("ring", 4, 100_000, 1e-3)]
    assert fit(steep).fabric.alpha_s == 0


def test_a_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="at least two sizes"):
        fit([Sample("ring", 4, 1000, 1e-3)] * 5)
    with pytest.raises(ValueError, match="longer than 0 s"):
        fit([])
    with pytest.raises(ValueError, match="one alpha and one beta"):
        fit(measured(SLOW_NET), like=NODES)


# ---- Scale -----------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_ranks_answer_within_seconds_and_a_gigabyte():
    tracemalloc.start()
    began = time.perf_counter()
    fabric = Fabric(5e-6, 1 / (50 * GB), local_size=8, local_alpha_s=1e-6, local_beta_s_per_byte=1 / (400 * GB))
    for collective in FORMS:
        choices = compare(100_000, GB, fabric, collective)
        assert len(choices) == len(FORMS[collective])
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 5
    assert peak < 100 * MB
    assert closed_form("all_reduce", "ring", 100_000, GB).steps == 199_998

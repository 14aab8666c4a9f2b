"""Every algorithm is proved, not sampled: the verifier's word holds for all inputs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpx.algorithms import ALGORITHMS, build
from ddpx.algorithms.double_tree import parent
from ddpx.algorithms.nodes import split_in_nodes
from ddpx.schedule import interleave, remap, then
from ddpx.verify import expression, verify

SIZES = [*range(1, 34), 48, 64, 100]
EVERY = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]
ALL_REDUCES = list(ALGORITHMS["all_reduce"])
FLAT = [name for name in ALL_REDUCES if name != "hierarchical"]


def test_the_six_collectives_are_there():
    assert set(ALGORITHMS) == {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"}
    assert {
        "ring",
        "tree",
        "double_tree",
        "doubling",
        "halving_doubling",
        "direct",
        "parameter_server",
        "hierarchical",
    } <= set(ALL_REDUCES)
    assert all(len(known) >= 3 for known in ALGORITHMS.values())


@pytest.mark.parametrize("collective, algorithm", EVERY)
def test_every_algorithm_keeps_its_contract_for_any_number_of_ranks(collective, algorithm):
    # An all-to-all has n * n chunks, so that a proof costs n times as much.
    for n in SIZES if collective != "all_to_all" else [*range(1, 34), 48]:
        schedule = build(collective, algorithm, n)
        assert (schedule.collective, schedule.algorithm, schedule.world_size) == (collective, algorithm, n)
        assert verify(schedule).same_bits


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_any_rank_can_be_the_root(collective):
    for algorithm in ALGORITHMS[collective]:
        for n in (2, 3, 5, 8, 13):
            for root in range(n):
                schedule = build(collective, algorithm, n, root=root)
                assert schedule.root == root
                verify(schedule)


@pytest.mark.parametrize("collective, algorithm", EVERY)
@pytest.mark.parametrize("k", [2, 5])
def test_every_algorithm_can_be_pipelined(collective, algorithm, k):
    for n in (1, 2, 3, 6, 8):
        verify(interleave(build(collective, algorithm, n), k))


@pytest.mark.parametrize("inner, outer", [("direct", "ring"), ("ring", "double_tree"), ("tree", "doubling")])
def test_hierarchical_over_nodes_1_to_6_and_local_sizes_1_to_8(inner, outer):
    for nodes in range(1, 7):
        for local_size in range(1, 9):
            schedule = build(
                "all_reduce", "hierarchical", nodes * local_size, local_size=local_size, inner=inner, outer=outer
            )
            verify(schedule)


INNER = sorted({*FLAT, *ALGORITHMS["reduce"]})


@pytest.mark.parametrize("inner", INNER)
def test_any_algorithm_inside_a_node_and_any_between(inner):
    for outer in FLAT:
        for nodes, local_size in ((2, 3), (3, 4), (5, 2)):
            verify(build("all_reduce", "hierarchical", nodes * local_size, nodes=nodes, inner=inner, outer=outer))


@pytest.mark.parametrize("inner", INNER)
def test_nodes_may_differ_in_size_and_list_their_ranks_in_any_order(inner):
    for nodes in ([[4, 0], [1, 3, 2]], [[0], [1, 2, 3, 4, 5], [8, 7, 6]], [[2, 1, 0]]):
        n = sum(map(len, nodes))
        verify(build("all_reduce", "hierarchical", n, nodes=nodes, inner=inner, outer="ring"))


def test_hierarchical_crosses_nodes_with_the_buffer_once_reduced():
    n, local_size = 12, 4
    schedule = build("all_reduce", "hierarchical", n, local_size=local_size, inner="ring", outer="ring")
    crossing = [
        (src, m.dst)
        for m in schedule.moves
        for src in m.srcs
        if src // local_size != m.dst // local_size
        for _ in range(m.lo, m.hi)
    ]
    # 3 nodes around 4 rings: each sends 2(3-1)/3 of the buffer of 12 chunks.
    assert all(len([c for c in crossing if c[0] // local_size == node]) == 16 for node in range(3))
    # Only ranks with the same local rank talk between nodes.
    assert all(src % local_size == dst % local_size for src, dst in crossing)


def test_nodes_are_split_evenly_or_leave_the_rest_to_the_last():
    assert split_in_nodes(5, 2, None) == [[0, 1], [2, 3], [4]]
    assert split_in_nodes(5, None, 2) == [[0, 1], [2, 3, 4]]
    assert split_in_nodes(3, None, None) == [[0, 1, 2]]
    assert split_in_nodes(4, 2, 2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"local_size": 0}, "local_size must be at least 1"),
        ({"nodes": 7}, "nodes must be 1..6 for 6 ranks"),
        ({"nodes": 4, "local_size": 2}, "4 nodes of local_size 2 are not 6 ranks"),
        ({"nodes": [[0, 1], [1, 2, 3, 4, 5]]}, "every rank 0..5 once"),
        ({"nodes": [[0, 1, 2, 3, 4, 5], []]}, "none may be empty"),
        ({"inner": "rung"}, "unknown inner algorithm 'rung'; known: .*ring"),
        ({"outer": "hierarchical"}, "unknown outer algorithm 'hierarchical'; known: ring"),
    ],
)
def test_hierarchical_says_what_is_wrong_with_its_options(options, text):
    with pytest.raises(ValueError, match=text):
        build("all_reduce", "hierarchical", 6, **options)


@pytest.mark.parametrize(
    "call, text",
    [
        (("all_redcue", "ring", 4), "unknown collective 'all_redcue'; known: all_reduce"),
        (("all_reduce", "rign", 4), "unknown algorithm 'rign' for all_reduce; known: ring, tree"),
        (("all_reduce", "ring", 0), "world_size must be at least 1, got 0"),
        (("broadcast", "tree", 4, 4), r"root must be a rank of the group, 0..3, got 4"),
        (("all_reduce", "ring", 4, 1), "all_reduce has no root, got root=1"),
    ],
)
def test_build_names_what_is_known(call, text):
    with pytest.raises(ValueError, match=text):
        build(*call)


def test_build_names_the_options_an_algorithm_takes():
    with pytest.raises(ValueError, match="double_tree all_reduce takes no option chunks; it takes segments"):
        build("all_reduce", "double_tree", 4, chunks=3)
    with pytest.raises(ValueError, match="takes none"):
        build("all_reduce", "ring", 4, segments=3)


def test_the_textbook_ring_leaves_chunk_r_plus_one_at_rank_r():
    for n in (2, 3, 4, 7):
        schedule = build("reduce_scatter", "ring", n, shift=1)
        verify(schedule, owner=lambda chunk, n=n: (chunk - 1) % n)
        whole = then(schedule, build("all_gather", "ring", n, shift=1))
        assert whole == build("all_reduce", "ring", n)


def test_direct_adds_in_rank_order_and_a_ring_starts_elsewhere_for_each_chunk():
    assert expression(build("all_reduce", "direct", 4), 2, 3) == "r0+r1+r2+r3"
    assert expression(build("all_reduce", "parameter_server", 4), 2, 0) == "r0+r1+r2+r3"
    ring = build("all_reduce", "ring", 3)
    assert {expression(ring, rank, 0) for rank in range(3)} == {"r2+(r1+r0)"}
    assert {expression(ring, rank, 1) for rank in range(3)} == {"r0+(r2+r1)"}


def test_recursive_doubling_reads_what_it_overwrites_and_a_ring_does_not():
    assert verify(build("all_reduce", "ring", 5)).overwrites == ()
    doubling = verify(build("all_reduce", "doubling", 4)).overwrites
    assert [(o.step, o.rank, o.lo, o.hi) for o in doubling] == [(s, r, 0, 1) for s in range(2) for r in range(4)]


def test_trees_take_ceil_log2_n_rounds_and_n_minus_1_sends():
    for n, rounds in ((8, 3), (9, 4)):
        broadcast = build("broadcast", "tree", n)
        assert broadcast.steps == rounds
        assert len(broadcast.moves) == n - 1


def test_no_rank_is_an_inner_node_of_both_trees():
    for n in range(2, 40):
        schedule = build("broadcast", "double_tree", n, segments=1)
        inner = [{m.srcs[0] for m in schedule.moves if m.lo == tree} - {0} for tree in (0, 1)]
        assert not inner[0] & inner[1]
        children = [sum(m.srcs[0] == rank and m.lo == 0 for m in schedule.moves) for rank in range(n)]
        assert max(children) <= 2 and children[0] == 1


def test_a_binary_tree_is_as_low_as_a_binary_tree_can_be():
    for n in range(2, 200):
        depth = [0] * n
        for rank in range(1, n):
            above = rank
            while above:
                above, depth[rank] = parent(above, n), depth[rank] + 1
        assert max(depth) == (n - 1).bit_length()


def test_circulant_takes_ceil_log2_n_rounds_for_every_n():
    for n in range(2, 40):
        for collective in ("all_gather", "reduce_scatter"):
            assert build(collective, "circulant", n).steps == (n - 1).bit_length()


def test_everything_can_be_built_twice():
    for collective, algorithm in EVERY:
        assert build(collective, algorithm, 7) == build(collective, algorithm, 7)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["tree", "double_tree", "doubling", "halving_doubling", "circulant", "ring"])
def test_a_thousand_ranks_are_built_and_proved_in_full(algorithm):
    verify(build("all_reduce", algorithm, 1000))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 12), k=st.integers(1, 4))
def test_parts_of_different_algorithms_compose_to_an_all_reduce(data, n, k):
    """Any reduce then any broadcast, or any reduce-scatter then any all-gather, pipelined, on renamed ranks."""
    first, second = data.draw(st.sampled_from([("reduce", "broadcast"), ("reduce_scatter", "all_gather")]))
    halves = [build(c, data.draw(st.sampled_from(sorted(ALGORITHMS[c]))), n) for c in (first, second)]
    ranks = data.draw(st.permutations(range(n)))
    verify(remap(interleave(then(*halves), k), ranks, n))

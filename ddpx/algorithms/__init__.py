"""Every algorithm of every collective, by name: pure functions from a number of ranks to a `Schedule`.

    build("all_reduce", "ring", 8)
    build("broadcast", "tree", 9, root=3)
    build("all_reduce", "hierarchical", 32, local_size=8, inner="direct", outer="double_tree")

An algorithm that bears the same name in reduce_scatter and all_gather (or reduce and broadcast) as in all_reduce is the
first and the second half of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ddpx.algorithms import (
    all_to_all,
    chain,
    direct,
    double_tree,
    doubling,
    parameter_server,
    ring,
    scatter_gather,
    tree,
)
from ddpx.algorithms.nodes import Nodes, compose, split_in_nodes
from ddpx.schedule import Schedule


def hierarchical(
    world_size: int,
    *,
    local_size: int | None = None,
    nodes: int | Nodes | None = None,
    inner: str = "direct",
    outer: str = "ring",
) -> Schedule:
    """Reduce inside each node, all-reduce between nodes, spread inside each node. For p ranks a node, m nodes:

    `inner` with a reduce_scatter and an all_gather (direct, ring, halving_doubling, circulant): p all-reduces of 1/p
    of the buffer run between nodes side by side, one for each local rank; with ring outside, 2(m-1) steps and
    2(m-1)/m of the buffer across each node's border, instead of 2(mp-1) steps. `inner` with a reduce and a broadcast
    (tree, double_tree, chain, scatter_gather): the first rank of each node carries the whole buffer between nodes.
    Any other all-reduce: the same, after an all-reduce inside. `outer` is any all-reduce.

    Nodes are `local_size` consecutive ranks (8 by default; the last node takes what is left), or `nodes` of them, or
    the lists of ranks in `nodes`; they may differ in size. Suits several ranks on each of several hosts. With two
    nodes of two ranks:

        step  rank 0     rank 1     rank 2     rank 3
           0  c0-1 += 1  c2-3 += 0  c0-1 += 3  c2-3 += 2
           1  c1 += 2    c3 += 3    c0 += 0    c2 += 1
           2  c0 = 2     c2 = 3     c1 = 0     c3 = 1
           3  c2-3 = 1   c0-1 = 0   c2-3 = 3   c0-1 = 2
    """
    plain = [name for name in ALGORITHMS["all_reduce"] if name != "hierarchical"]
    usable = sorted({*plain, *(set(ALGORITHMS["reduce"]) & set(ALGORITHMS["broadcast"]))})
    if inner not in usable:
        raise ValueError(f"unknown inner algorithm {inner!r}; known: {', '.join(usable)}.")
    if outer not in plain:
        raise ValueError(f"unknown outer algorithm {outer!r}; known: {', '.join(plain)}.")
    return compose(ALGORITHMS, world_size, split_in_nodes(world_size, local_size, nodes), inner, outer)


_Algorithms = Mapping[str, Callable[..., Schedule]]


def _named(**algorithms: Callable[..., Schedule]) -> _Algorithms:
    return MappingProxyType(algorithms)


ALGORITHMS: Mapping[str, _Algorithms] = MappingProxyType(
    {
        "all_reduce": _named(
            ring=ring.all_reduce,
            tree=tree.all_reduce,
            double_tree=double_tree.all_reduce,
            doubling=doubling.all_reduce,
            halving_doubling=doubling.halving_doubling,
            circulant=doubling.circulant,
            direct=direct.all_reduce,
            parameter_server=parameter_server.all_reduce,
            hierarchical=hierarchical,
        ),
        "reduce_scatter": _named(
            ring=ring.reduce_scatter,
            halving_doubling=doubling.halving_reduce_scatter,
            circulant=doubling.circulant_reduce_scatter,
            direct=direct.reduce_scatter,
        ),
        "all_gather": _named(
            ring=ring.all_gather,
            halving_doubling=doubling.doubling_all_gather,
            circulant=doubling.circulant_all_gather,
            direct=direct.all_gather,
        ),
        "broadcast": _named(
            tree=tree.broadcast,
            double_tree=double_tree.broadcast,
            chain=chain.broadcast,
            scatter_gather=scatter_gather.broadcast,
            direct=direct.broadcast,
        ),
        "reduce": _named(
            tree=tree.reduce,
            double_tree=double_tree.reduce,
            chain=chain.reduce,
            scatter_gather=scatter_gather.reduce,
            direct=direct.reduce,
        ),
        "all_to_all": _named(direct=direct.all_to_all, pairwise=all_to_all.pairwise, bruck=all_to_all.bruck),
    }
)


def build(collective: str, algorithm: str, world_size: int, root: int = 0, **options: Any) -> Schedule:
    """The schedule of `algorithm` for `collective` over `world_size` ranks; `options` are the algorithm's own.

    Raises ValueError, naming what is known, for an unknown collective, algorithm or option and for a root outside the
    group. `root` matters to broadcast and reduce and must be 0 elsewhere.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(ALGORITHMS)}.")
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise ValueError(f"unknown algorithm {algorithm!r} for {collective}; known: {', '.join(known)}.")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}.")
    if not 0 <= root < world_size:
        raise ValueError(f"root must be a rank of the group, 0..{world_size - 1}, got {root}.")
    function = known[algorithm]
    parameters = inspect.signature(function).parameters
    accepted = [name for name in parameters if name not in ("world_size", "root")]
    if unknown := sorted(set(options) - set(accepted)):
        taken = ", ".join(accepted) or "none"
        raise ValueError(f"{algorithm} {collective} takes no option {', '.join(unknown)}; it takes {taken}.")
    if "root" in parameters:
        return function(world_size, root=root, **options)
    if root != 0:
        raise ValueError(f"{collective} has no root, got root={root}.")
    return function(world_size, **options)

"""Hierarchical: an all-reduce in three parts for ranks that share hosts: inside each node, between nodes, inside again.

Links inside a node are fast and many, those between nodes slow and few; a flat algorithm runs at the pace of the
slowest link at every step. Here only reduced data crosses between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ddpx.schedule import Schedule, remap, then, together, within

Known = Mapping[str, Mapping[str, Callable[..., Schedule]]]
Nodes = Sequence[Sequence[int]]


def split_in_nodes(world_size: int, local_size: int | None, nodes: int | Nodes | None) -> list[list[int]]:
    """The ranks of each node: as listed, or `nodes` of them, or `local_size` consecutive ranks each (8 if not given).

    Consecutive nodes may be uneven: the last one takes what is left.
    """
    n = world_size
    if nodes is not None and not isinstance(nodes, int):
        listed = [list(node) for node in nodes]
        if sorted(rank for node in listed for rank in node) != list(range(n)) or not all(listed):
            raise ValueError(f"nodes must name every rank 0..{n - 1} once and none may be empty, got {listed}.")
        return listed
    if nodes is not None:
        if not 1 <= nodes <= n:
            raise ValueError(f"nodes must be 1..{n} for {n} ranks, got {nodes}.")
        if local_size is not None and local_size * nodes != n:
            raise ValueError(f"{nodes} nodes of local_size {local_size} are not {n} ranks; pass one of the two.")
        return [list(range(i * n // nodes, (i + 1) * n // nodes)) for i in range(nodes)]
    local_size = 8 if local_size is None else local_size
    if local_size < 1:
        raise ValueError(f"local_size must be at least 1, got {local_size}.")
    return [list(range(start, min(start + local_size, n))) for start in range(0, n, local_size)]


def compose(known: Known, world_size: int, inside: Sequence[Sequence[int]], inner: str, outer: str) -> Schedule:
    """The three parts, from the algorithms in `known`; `algorithms.hierarchical` says which inner ones do what."""
    n = world_size

    def in_nodes(collective: str) -> Schedule:
        return together(*(remap(known[collective][inner](len(node)), node, n) for node in inside))

    def between(peers: list[int]) -> Schedule:
        return remap(known["all_reduce"][outer](len(peers)), peers, n)

    leaders = [node[0] for node in inside]
    if inner in known["reduce_scatter"] and inner in known["all_gather"]:
        # Each piece of the buffer has one owner in every node; the owners of a piece reduce it among themselves. Nodes
        # of different size own pieces of different size, so the buffer is cut finely enough for all of them.
        pieces = math.lcm(*(len(node) for node in inside))
        owners = [[node[piece * len(node) // pieces] for node in inside] for piece in range(pieces)]
        rails = [between(peers) for peers in owners]
        middle = together(*(within(r, i * r.chunks, pieces * r.chunks) for i, r in enumerate(rails)))
        parts = [in_nodes("reduce_scatter"), middle, in_nodes("all_gather")]
    elif inner in known["reduce"] and inner in known["broadcast"]:
        parts = [in_nodes("reduce"), between(leaders), in_nodes("broadcast")]
    else:
        spread = together(*(remap(known["broadcast"]["tree"](len(node)), node, n) for node in inside))
        parts = [in_nodes("all_reduce"), between(leaders), spread]
    whole = parts[0]
    for part in parts[1:]:
        whole = then(whole, part, algorithm="hierarchical", collective="all_reduce")
    return whole

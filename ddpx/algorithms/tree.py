"""Trees: few steps, whole buffers. What small buffers and many ranks want."""

from __future__ import annotations

from ddpx.schedule import Move, Schedule, remap, reverse, then


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """Binomial tree: at each step, every rank that has the buffer passes it on.

    ceil(log2 n) steps, n-1 sends of the whole buffer, ceil(log2 n) of them by the root. The longest hops come first, so
    that with ranks numbered node by node a buffer crosses to each node once. Source: Thakur, Rabenseifner and Gropp,
    Optimization of collective communication operations in MPICH, 2005.

        step  rank 0  rank 1  rank 2  rank 3
           0  .       .       c0 = 0  .
           1  .       c0 = 0  .       c0 = 2
    """
    n = world_size
    levels = (n - 1).bit_length()
    moves = []
    for step in range(levels):
        hop = 1 << (levels - 1 - step)
        moves += [Move(step, src + hop, (src,), 0, 1) for src in range(0, n - hop, 2 * hop)]
    schedule = Schedule("tree", "broadcast", n, 1, tuple(moves))
    return remap(schedule, [(root + rank) % n for rank in range(n)], n)


def reduce(world_size: int, root: int = 0) -> Schedule:
    """Binomial tree, from the leaves to the root.

    ceil(log2 n) steps; every rank but the root sends the whole buffer once.

        step  rank 0   rank 1  rank 2   rank 3
           0  c0 += 1  .       c0 += 3  .
           1  c0 += 2  .       .        .
    """
    return reverse(broadcast(world_size, root))


def all_reduce(world_size: int) -> Schedule:
    """Binomial reduce to rank 0, then binomial broadcast.

    2 ceil(log2 n) steps; rank 0 sends ceil(log2 n) whole buffers, the ranks together 2(n-1). Suits small buffers.

        step  rank 0   rank 1  rank 2   rank 3
           0  c0 += 1  .       c0 += 3  .
           1  c0 += 2  .       .        .
           2  .        .       c0 = 0   .
           3  .        c0 = 0  .        c0 = 2
    """
    return then(reduce(world_size), broadcast(world_size))

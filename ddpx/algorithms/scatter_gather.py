"""Broadcast and reduce of large buffers in two halves, so that no rank sends the whole buffer log2 n times.

Source: Barnett, Shuler, van de Geijn et al., Interprocessor collective communication library, 1994, for the broadcast;
Rabenseifner, 2004, for the reduce.
"""

from __future__ import annotations

from dataclasses import replace

from ddpx.algorithms import ring
from ddpx.schedule import Move, Schedule, remap, then


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """Scatter the buffer down a binomial tree, then all-gather it around a ring.

    ceil(log2 n) + n - 1 steps; the root sends 2(n-1)/n of the buffer, nobody more. Suits large buffers.

        step  rank 0  rank 1  rank 2    rank 3
           0  .       .       c2-3 = 0  .
           1  .       c1 = 0  .         c3 = 2
           2  c3 = 3  c0 = 0  c1 = 1    c2 = 2
           3  c2 = 3  c3 = 0  c0 = 1    c1 = 2
           4  c1 = 3  c2 = 0  c3 = 1    c0 = 2
    """
    n = world_size
    halves = then(_scatter(n), ring.all_gather(n), algorithm="scatter_gather", collective="broadcast")
    return remap(halves, [(root + rank) % n for rank in range(n)], n)


def reduce(world_size: int, root: int = 0) -> Schedule:
    """Reduce-scatter around a ring, then gather the sums up a binomial tree to the root.

    n - 1 + ceil(log2 n) steps; each rank but the root sends (n-1)/n of the buffer and its part of the gather, at most
    half a buffer more. Suits large buffers.
    """
    n = world_size
    down = _scatter(n)
    up = [Move(down.steps - 1 - m.step, m.srcs[0], (m.dst,), m.lo, m.hi) for m in down.moves]
    gather = replace(down, moves=tuple(up))
    halves = then(ring.reduce_scatter(n), gather, algorithm="scatter_gather", collective="reduce")
    return remap(halves, [(root + rank) % n for rank in range(n)], n)


def _scatter(world_size: int) -> Schedule:
    """Rank 0 has all chunks; at the end rank r has chunk r. A rank passes on what belongs to the ranks below it."""
    n = world_size
    levels = (n - 1).bit_length()
    moves = []
    for step in range(levels):
        hop = 1 << (levels - 1 - step)
        moves += [Move(step, src + hop, (src,), src + hop, min(src + 2 * hop, n)) for src in range(0, n - hop, 2 * hop)]
    return Schedule("scatter_gather", "broadcast", n, n, tuple(moves))

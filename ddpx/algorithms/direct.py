"""Direct: every rank reads every other at once. What shared memory and NVLink like best.

Sums are taken in rank order 0, 1, ..., n-1 whatever the size, the layout or the bucket, so the result equals one
process that adds the same n buffers in that order, bit for bit.
"""

from __future__ import annotations

from ddpx.schedule import Move, Schedule, then


def all_reduce(world_size: int) -> Schedule:
    """Two-shot: rank r sums chunk r of all ranks in rank order; then everybody copies the others' sums.

    2 steps of n-1 messages; each rank sends 2(n-1)/n of the buffer. Suits links that carry n-1 peers at once.

        step  rank 0          rank 1          rank 2
           0  c0 = 0+1+2      c1 = 0+1+2      c2 = 0+1+2
           1  c1 = 1, c2 = 2  c0 = 0, c2 = 2  c0 = 0, c1 = 1
    """
    return then(reduce_scatter(world_size), all_gather(world_size))


def reduce_scatter(world_size: int) -> Schedule:
    """Rank r reads chunk r of every rank and adds in rank order: 1 step, (n-1)/n of the buffer sent per rank."""
    n = world_size
    everyone = tuple(range(n))
    moves = [Move(0, rank, everyone, rank, rank + 1) for rank in range(n)] if n > 1 else []
    return Schedule("direct", "reduce_scatter", n, n, tuple(moves))


def all_gather(world_size: int) -> Schedule:
    """Every rank copies every other rank's chunk: 1 step, (n-1)/n of the gathered buffer sent per rank."""
    n = world_size
    moves = [Move(0, dst, (src,), src, src + 1) for dst in range(n) for src in range(n) if src != dst]
    return Schedule("direct", "all_gather", n, n, tuple(moves))


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """The root sends the whole buffer to each of the others: 1 step, n-1 buffers sent by the root."""
    moves = [Move(0, rank, (root,), 0, 1) for rank in range(world_size) if rank != root]
    return Schedule("direct", "broadcast", world_size, 1, tuple(moves), root)


def reduce(world_size: int, root: int = 0) -> Schedule:
    """The root reads every buffer and adds in rank order: 1 step, one buffer sent by each of the others."""
    moves = [Move(0, root, tuple(range(world_size)), 0, 1)] if world_size > 1 else []
    return Schedule("direct", "reduce", world_size, 1, tuple(moves), root)


def all_to_all(world_size: int) -> Schedule:
    """Everybody sends to everybody at once: 1 step, n-1 messages of 1/n of a rank's buffer sent per rank."""
    n = world_size
    moves = [
        Move(0, dst, (src,), src * n + dst, src * n + dst + 1) for dst in range(n) for src in range(n) if src != dst
    ]
    return Schedule("direct", "all_to_all", n, n * n, tuple(moves))

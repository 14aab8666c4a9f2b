"""A chain, pipelined: each rank passes every segment on to the next. Full bandwidth, latency n."""

from __future__ import annotations

from ddpx.schedule import Move, Schedule, interleave, remap, reverse


def broadcast(world_size: int, root: int = 0, *, segments: int = 8) -> Schedule:
    """Each rank passes segment after segment to the next.

    n - 2 + segments steps; each rank but the last sends one buffer's worth. Suits large buffers on few ranks. With two
    segments:

        step  rank 0  rank 1  rank 2
           0  .       c0 = 0  .
           1  .       c1 = 0  c0 = 1
           2  .       .       c1 = 1
    """
    return interleave(_chain(world_size, root), segments)


def reduce(world_size: int, root: int = 0, *, segments: int = 8) -> Schedule:
    """The chain backwards, each rank adding what comes from the next. The same two numbers."""
    return interleave(reverse(_chain(world_size, root)), segments)


def _chain(world_size: int, root: int) -> Schedule:
    n = world_size
    moves = tuple(Move(rank - 1, rank, (rank - 1,), 0, 1) for rank in range(1, n))
    return remap(Schedule("chain", "broadcast", n, 1, moves), [(root + rank) % n for rank in range(n)], n)

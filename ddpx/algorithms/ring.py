"""Rings: every rank talks only to its neighbours, and every link carries the same number of bytes at every step.

All of these are optimal in bytes and slow in steps: what large buffers want. Source: Patarasuk and Yuan, Bandwidth
optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

from ddpx.schedule import Move, Schedule, then


def all_reduce(world_size: int) -> Schedule:
    """Reduce-scatter, then all-gather, around the ring.

    2(n-1) steps; each rank sends 2(n-1)/n of the buffer. No algorithm sends less, so it suits large buffers; its
    latency grows with n. Chunk c is summed in the order c, c+1, ..., c-1, so the order depends on the place in the
    buffer.

        step  rank 0   rank 1   rank 2   rank 3
           0  c3 += 3  c0 += 0  c1 += 1  c2 += 2
           1  c2 += 3  c3 += 0  c0 += 1  c1 += 2
           2  c1 += 3  c2 += 0  c3 += 1  c0 += 2
           3  c0 = 3   c1 = 0   c2 = 1   c3 = 2
           4  c3 = 3   c0 = 0   c1 = 1   c2 = 2
           5  c2 = 3   c3 = 0   c0 = 1   c1 = 2
    """
    return then(reduce_scatter(world_size, shift=1), all_gather(world_size, shift=1))


def reduce_scatter(world_size: int, *, shift: int = 0) -> Schedule:
    """Partial sums travel once around; rank r ends with chunk (r + shift) mod n.

    n-1 steps; each rank sends (n-1)/n of the buffer. `shift=0` is the contract of reduce_scatter, `shift=1` the
    textbook's ring, the first half of the all-reduce, in which rank 0 sends chunk 0 first.
    """
    n = world_size
    moves = [
        Move(step, dst, (dst, (dst - 1) % n), chunk, chunk + 1)
        for step in range(n - 1)
        for dst in range(n)
        for chunk in [(dst - step - 2 + shift) % n]
    ]
    return Schedule("ring", "reduce_scatter", n, n, tuple(moves))


def all_gather(world_size: int, *, shift: int = 0) -> Schedule:
    """Whole chunks travel once around; rank r begins with chunk (r + shift) mod n.

    n-1 steps; each rank sends (n-1)/n of the gathered buffer.
    """
    n = world_size
    moves = [
        Move(step, dst, ((dst - 1) % n,), chunk, chunk + 1)
        for step in range(n - 1)
        for dst in range(n)
        for chunk in [(dst - step - 1 + shift) % n]
    ]
    return Schedule("ring", "all_gather", n, n, tuple(moves))

"""The textbook's naive all-reduce: one rank gathers, sums, and sends the result to everybody."""

from __future__ import annotations

from ddpx.algorithms import direct
from ddpx.schedule import Schedule, then


def all_reduce(world_size: int) -> Schedule:
    """Rank 0 reads every buffer, adds in rank order, and sends the sum to all.

    2 steps, but 2(n-1) whole buffers pass through the link of one rank, one after the other; the others send one
    each. In all as many bytes as a ring. Suits two or three ranks, and showing why rings exist.

        step  rank 0      rank 1  rank 2
           0  c0 = 0+1+2  .       .
           1  .           c0 = 0  c0 = 0
    """
    return then(direct.reduce(world_size), direct.broadcast(world_size), algorithm="parameter_server")

"""All-to-all: rank s has a chunk for every rank d, and must end with the chunks that every rank has for it.

Chunk s * n + d is what rank s has for rank d: chunks keep their number wherever they lie. `direct.all_to_all` sends
all at once; here are the two that send to one partner at a time.
"""

from __future__ import annotations

from ddpx.schedule import Move, Schedule


def pairwise(world_size: int) -> Schedule:
    """At step i, every rank sends to the rank i + 1 places on and receives from the one i + 1 places back.

    n - 1 steps; each rank sends (n-1)/n of its buffer, the least there is. Suits large chunks: no link carries two
    messages at once.

        step  rank 0  rank 1  rank 2
           0  c6 = 2  c1 = 0  c5 = 1
           1  c3 = 1  c7 = 2  c2 = 0
    """
    n = world_size
    moves = []
    for step in range(n - 1):
        for dst in range(n):
            src = (dst - step - 1) % n
            moves.append(Move(step, dst, (src,), src * n + dst, src * n + dst + 1))
    return Schedule("pairwise", "all_to_all", n, n * n, tuple(moves))


def bruck(world_size: int) -> Schedule:
    """At step i, every chunk that has still to travel a distance with bit i set moves 2^i ranks on.

    ceil(log2 n) steps; each rank sends about half of its buffer at each. Suits the smallest chunks. Source: Bruck et
    al., 1997.

        step  rank 0            rank 1           rank 2           rank 3
           0  c12 = 3, c14 = 3  c1 = 0, c3 = 0   c4 = 1, c6 = 1   c9 = 2, c11 = 2
           1  c4 = 2, c8 = 2    c9 = 3, c13 = 3  c2 = 0, c14 = 0  c3 = 1, c7 = 1
    """
    n = world_size
    moves = []
    for src in range(n):
        for distance in range(1, n):
            chunk = src * n + (src + distance) % n
            at = src
            for step in range(distance.bit_length()):
                if distance >> step & 1:
                    to = (at + (1 << step)) % n
                    moves.append(Move(step, to, (at,), chunk, chunk + 1))
                    at = to
    return Schedule("bruck", "all_to_all", n, n * n, tuple(moves))

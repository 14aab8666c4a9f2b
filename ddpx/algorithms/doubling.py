"""Doubling: at every step the distance between partners doubles or halves, so log2 n steps reach everybody.

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, for
powers of two and folding; Bruck et al., Efficient algorithms for all-to-all communications in multiport
message-passing systems, 1997, and Träff, Optimal, non-pipelined reduce-scatter and allreduce algorithms, 2024, for
the circulant form.
"""

from __future__ import annotations

from ddpx.schedule import Move, Schedule, delay, reverse, then, together


def all_reduce(world_size: int) -> Schedule:
    """Recursive doubling: partners swap their whole buffers and both add.

    log2 n steps; each rank sends log2 n whole buffers. The fewest steps there are: suits the smallest buffers. Beyond
    the last power of two, a rank first adds its buffer to a partner's and at the end copies the result: 2 more steps.
    Every step reads what it overwrites. Partners add in the same order, so their bits agree.

        step  rank 0   rank 1   rank 2   rank 3
           0  c0 += 1  c0 += 0  c0 += 3  c0 += 2
           1  c0 += 2  c0 += 3  c0 += 0  c0 += 1
    """
    core = _power_of_two(world_size)
    moves = []
    for step in range(core.bit_length() - 1):
        for rank in range(core):
            peer = rank ^ (1 << step)
            moves.append(Move(step, rank, (min(rank, peer), max(rank, peer)), 0, 1))
    return _folded(Schedule("doubling", "all_reduce", core, 1, tuple(moves)), world_size)


def halving_doubling(world_size: int) -> Schedule:
    """Rabenseifner's algorithm: recursive halving (a reduce-scatter), then recursive doubling (an all-gather).

    2 log2 n steps; each rank sends 2(n-1)/n of the buffer, as in a ring, in far fewer steps. Suits middle sizes, and
    large ones where far partners are as fast as near ones. Not a power of two: the ranks beyond it are folded in, 2
    more steps of the whole buffer; `circulant` does without.

        step  rank 0     rank 1     rank 2     rank 3
           0  c0-1 += 2  c0-1 += 3  c2-3 += 0  c2-3 += 1
           1  c0 += 1    c1 += 0    c2 += 3    c3 += 2
           2  c1 = 1     c0 = 0     c3 = 3     c2 = 2
           3  c2-3 = 2   c2-3 = 3   c0-1 = 0   c0-1 = 1
    """
    core = _power_of_two(world_size)
    return _folded(then(halving_reduce_scatter(core), doubling_all_gather(core)), world_size)


def doubling_all_gather(world_size: int) -> Schedule:
    """The second half of halving_doubling, for any n: what a rank has doubles at every step.

    log2 n steps; each rank sends (n-1)/n of the gathered buffer. Not a power of two: 2 more steps, in which neighbours
    share a place (rank 2v + 1 hands its chunk to rank 2v and gets the result from it).

        step  rank 0    rank 1    rank 2    rank 3
           0  c1 = 1    c0 = 0    c3 = 3    c2 = 2
           1  c2-3 = 2  c2-3 = 3  c0-1 = 0  c0-1 = 1
    """
    n, core = world_size, _power_of_two(world_size)
    extra = n - core
    place = [2 * v if v < extra else v + extra for v in range(core)] + [n]  # of core rank v: its rank and first chunk
    moves = [Move(0, 2 * v, (2 * v + 1,), 2 * v + 1, 2 * v + 2) for v in range(extra)]
    step = 1 if extra else 0
    for bit in range(core.bit_length() - 1):
        hop = 1 << bit
        for v in range(core):
            first = (v ^ hop) & -hop
            moves.append(Move(step + bit, place[v], (place[v ^ hop],), place[first], place[first + hop]))
    step += core.bit_length() - 1
    for v in range(extra):
        odd = 2 * v + 1
        moves += [Move(step, odd, (2 * v,), lo, hi) for lo, hi in ((0, odd), (odd + 1, n)) if lo < hi]
    return Schedule("halving_doubling", "all_gather", n, n, tuple(moves))


def halving_reduce_scatter(world_size: int) -> Schedule:
    """The first half of halving_doubling, for any n: what a rank is responsible for halves at every step.

    log2 n steps (2 more if n is not a power of two); each rank sends (n-1)/n of the buffer.

        step  rank 0     rank 1     rank 2     rank 3
           0  c0-1 += 2  c0-1 += 3  c2-3 += 0  c2-3 += 1
           1  c0 += 1    c1 += 0    c2 += 3    c3 += 2
    """
    return reverse(doubling_all_gather(world_size))


def circulant_all_gather(world_size: int) -> Schedule:
    """Bruck's all-gather: rank r gets from rank r + 1, then r + 2, r + 4, ... all that it lacks of what they have.

    ceil(log2 n) steps; each rank sends (n-1)/n of the gathered buffer: the least of both, for any n. All ranks do the
    same at every step.

        step  rank 0  rank 1  rank 2
           0  c1 = 1  c2 = 2  c0 = 0
           1  c2 = 2  c0 = 0  c1 = 1
    """
    n = world_size
    moves = []
    for step in range((n - 1).bit_length()):
        hop = 1 << step
        count = min(hop, n - hop)
        for dst in range(n):
            src = (dst + hop) % n
            end = src + count  # [src, end) of a circle of n chunks: one range, or two where it passes n
            moves += [Move(step, dst, (src,), lo, hi) for lo, hi in ((0, end - n), (src, min(end, n))) if lo < hi]
    return Schedule("circulant", "all_gather", n, n, tuple(moves))


def circulant_reduce_scatter(world_size: int) -> Schedule:
    """Bruck's all-gather backwards: a rank takes in half of what it still lacks at every step.

    ceil(log2 n) steps; each rank sends (n-1)/n of the buffer: the least of both, for any n.

        step  rank 0   rank 1   rank 2
           0  c0 += 1  c1 += 2  c2 += 0
           1  c0 += 2  c1 += 0  c2 += 1
    """
    return reverse(circulant_all_gather(world_size))


def circulant(world_size: int) -> Schedule:
    """Circulant reduce-scatter, then circulant all-gather.

    2 ceil(log2 n) steps; each rank sends 2(n-1)/n of the buffer: as good as halving_doubling for powers of two, and the
    same for every other n. A message may be two ranges of the buffer.
    """
    return then(circulant_reduce_scatter(world_size), circulant_all_gather(world_size))


def _power_of_two(world_size: int) -> int:
    """The largest power of two that is not above `world_size`."""
    return 1 << (world_size.bit_length() - 1)


def _folded(core: Schedule, world_size: int) -> Schedule:
    """An all-reduce of more ranks than `core` has: rank core + i adds its buffer to rank i's, and copies the result."""
    n, extra = core.world_size, world_size - core.world_size
    if extra == 0:
        return core
    fold = [Move(0, rank, (rank, n + rank), 0, core.chunks) for rank in range(extra)]
    unfold = [Move(core.steps + 1, n + rank, (rank,), 0, core.chunks) for rank in range(extra)]
    name, chunks = core.algorithm, core.chunks
    folding = Schedule(name, "all_reduce", world_size, chunks, tuple(fold + unfold))
    return together(folding, Schedule(name, "all_reduce", world_size, chunks, delay(core, 1).moves))

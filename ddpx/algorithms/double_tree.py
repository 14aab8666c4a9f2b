"""Two binary trees at once, each on half of the data, pipelined: the bytes of a ring in the steps of a tree.

In a binary tree half of the ranks are leaves, which receive and never pass on, so half of the links idle. The second
tree is placed so that the leaves of one are the inner ranks of the other: every rank sends and receives on both.
Source: Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009; NCCL
does so too.

    eight ranks       first tree      second tree (moved by one)
                           0               0
                           4               5
                         2   6           3   7
                        1 3 5 7         2 4 6 1
"""

from __future__ import annotations

from ddpx.schedule import Move, Schedule, beside, interleave, remap, reverse, then


def all_reduce(world_size: int, *, segments: int = 4) -> Schedule:
    """Reduce up both trees and broadcast down them, segment after segment.

    About 2 log2 n + segments steps; each rank sends at most 2 buffers' worth, as in a ring of many ranks. Suits middle
    to large buffers on many ranks: latency log2 n, full bandwidth once there are many segments. With one segment:

        step  rank 0            rank 1   rank 2
           0  .                 c1 += 2  c0 += 1
           1  c1 += 1, c0 += 2  .        .
           2  .                 c1 = 0   c0 = 0
           3  .                 c0 = 2   c1 = 1
    """
    base = _both_trees(world_size, 0)
    return interleave(then(reverse(base), base), segments)


def broadcast(world_size: int, root: int = 0, *, segments: int = 4) -> Schedule:
    """The root feeds both trees. About log2 n + segments steps; each rank sends at most one buffer's worth."""
    return interleave(_both_trees(world_size, root), segments)


def reduce(world_size: int, root: int = 0, *, segments: int = 4) -> Schedule:
    """Both trees end at the root. About log2 n + segments steps; each rank but the root sends one buffer's worth."""
    return interleave(reverse(_both_trees(world_size, root)), segments)


def _both_trees(world_size: int, root: int) -> Schedule:
    """A broadcast of one segment: chunk 0 down the first tree, chunk 1 down the second."""
    n = world_size
    first = _tree(n)
    # Odd places are leaves. The second tree puts odd places where the first has even ones: moved by one around the
    # circle of the n - 1 ranks below the root if that circle is odd, mirrored if it is even.
    others = [rank % (n - 1) + 1 if n % 2 == 0 else n - rank for rank in range(1, n)]
    both = beside(first, remap(first, [0, *others], n))
    return remap(both, [(root + rank) % n for rank in range(n)], n)


def _tree(world_size: int) -> Schedule:
    """Broadcast down an in-order binary tree of ranks 1..n-1 that hangs from rank 0; both children at one step."""
    moves = []
    for rank in range(1, world_size):
        depth, above = 1, parent(rank, world_size)
        while above:
            depth, above = depth + 1, parent(above, world_size)
        moves.append(Move(depth - 1, rank, (parent(rank, world_size),), 0, 1))
    return Schedule("double_tree", "broadcast", world_size, 1, tuple(moves))


def parent(rank: int, world_size: int) -> int:
    """The rank above `rank` > 0: its lowest set bit moves up by one, or is dropped where that rank does not exist."""
    low = rank & -rank
    up = (rank ^ low) | (low << 1)
    return up if up < world_size else rank ^ low

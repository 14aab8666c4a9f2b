"""Every algorithm of every collective, by name: pure functions from a number of ranks to a `Schedule`.

build("all_reduce", "ring", 8)
build("broadcast", "tree", 9, root=3)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ddpx.algorithms import direct, ring, tree
from ddpx.schedule import Schedule

ALGORITHMS: Mapping[str, Mapping[str, Callable[..., Schedule]]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType({"ring": ring.all_reduce, "tree": tree.all_reduce, "direct": direct.all_reduce}),
        "reduce_scatter": MappingProxyType({"ring": ring.reduce_scatter, "direct": direct.reduce_scatter}),
        "all_gather": MappingProxyType({"ring": ring.all_gather, "direct": direct.all_gather}),
        "broadcast": MappingProxyType({"tree": tree.broadcast}),
        "reduce": MappingProxyType({"tree": tree.reduce}),
        "all_to_all": MappingProxyType({}),
    }
)


def build(collective: str, algorithm: str, world_size: int, root: int = 0, **options: Any) -> Schedule:
    """The schedule of `algorithm` for `collective` over `world_size` ranks; `options` are the algorithm's own.

    Raises ValueError, naming what is known, for an unknown collective, algorithm or option and for a root outside the
    group. `root` matters to broadcast and reduce and must be 0 elsewhere.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(ALGORITHMS)}.")
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise ValueError(f"unknown algorithm {algorithm!r} for {collective}; known: {', '.join(known)}.")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}.")
    if not 0 <= root < world_size:
        raise ValueError(f"root must be a rank of the group, 0..{world_size - 1}, got {root}.")
    function = known[algorithm]
    accepted = [name for name in inspect.signature(function).parameters if name not in ("world_size", "root")]
    if unknown := sorted(set(options) - set(accepted)):
        raise ValueError(
            f"{algorithm} {collective} takes no option {', '.join(unknown)}; it takes {', '.join(accepted) or 'none'}."
        )
    if "root" in inspect.signature(function).parameters:
        return function(world_size, root=root, **options)
    if root != 0:
        raise ValueError(f"{collective} has no root, got root={root}.")
    return function(world_size, **options)

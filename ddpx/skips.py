"""Count the forwards of a step whose backward was skipped, which would mix gradients of two steps.

A forward counts when its graph was still there as the next one ran and is gone as a backward begins: so it is with a
loss that a loop overwrites after a `continue`. A result that is dropped at once, such as that of a look at some
samples, does not count, nor does a graph that this backward may be about to go through.
"""

import weakref


class Skips:
    """Of the time since the last synchronised backward. It keeps no graph alive."""

    def __init__(self) -> None:
        self._last: weakref.ref[object] | None = None
        self._outlasted: list[weakref.ref[object]] = []  # those that were there as the next forward ran

    def forward(self, held: object) -> None:
        """A training forward ran; `held` lives as long as its graph."""
        if self._last is not None and self._last() is not None:
            self._outlasted.append(self._last)
        self._last = weakref.ref(held)

    def count(self) -> int:
        return sum(held() is None for held in self._outlasted)

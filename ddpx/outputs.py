"""Find the tensors in whatever a module returns."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

LEAVES = (str, bytes, int, float, complex, type, nn.Module)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts, dataclasses and objects with attributes."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif value is not None and not isinstance(value, LEAVES) and id(value) not in seen:
            seen.add(id(value))
            waiting += _children(value)


def _children(value: Any) -> list[Any]:
    """What hangs on a value: its elements and its attributes (a dataclass's fields are); a container may have both."""
    children: list[Any] = []
    if isinstance(value, Mapping):
        children += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children += value
    children += getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        children += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return children

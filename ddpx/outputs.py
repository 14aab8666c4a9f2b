"""Find the tensors in whatever a module returns."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

LEAVES = (str, bytes, int, float, complex, type, nn.Module)


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts, dataclasses and objects with attributes."""
    seen = set() if _seen is None else _seen
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__"):
        children = vars(value).values()
    else:
        children = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    for child in list(children):
        yield from tensors_in(child, seen)

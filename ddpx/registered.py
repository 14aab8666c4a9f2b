"""What is registered in a wrapped model, looked at before each synchronised forward.

Users inject adapters, replace heads, prune, freeze and register buffers after wrapping. Each such change ends in
the right gradient or in an error that names the parameter; buffers are simply what they are now.

Note: cheap looks. Every module, parameter and buffer stands in some module's table. The tables are read as one list and
compared, object by object, with what stood there before; only where that differs the model is walked again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_

import torch
from torch import Tensor, nn

from ddpx.checks import buffers_of


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter as it was wrapped."""

    name: str
    param: nn.Parameter
    trained: bool
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size


class Registered:
    """The parameters and buffers of `module` that are not `ignored`."""

    def __init__(self, module: nn.Module, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._lent: list[str] = []  # where another tensor stands in for a parameter, in a functional call
        self._places = [_place(name, param) for name, param in self._walk().items() if isinstance(param, nn.Parameter)]
        self._take_in()

    def look(self) -> tuple[str, list[str]]:
        """What has happened to the first parameter that cannot be trained as wrapped ("" if all can), and who is not
        trained now: frozen for a while, or stood in for by a tensor in a functional call.
        """
        entries = self._read()
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            change = self._walk_again()
            if change:
                return change, []
        frozen = list(self._lent)
        for place in self._places:
            param = place.param
            same = param.requires_grad is place.trained and param.dtype is place.dtype and param.device == place.device
            if same and param.shape == place.shape:
                continue
            if place.name in self._lent:
                continue
            change = _change(place)
            if change:
                return change, []
            frozen.append(place.name)
        return "", frozen

    def _read(self) -> list[object]:
        return list(chain.from_iterable(table.values() for table in self._tables))

    def _walk(self) -> dict[str, Tensor]:
        """By name, each once: what stands where parameters are registered."""
        named = self._module.named_parameters()
        return {name: param for name, param in named if name not in self._ignored}

    def _walk_again(self) -> str:
        """Find the parameters anew, by identity: a change of name or place alone, as in pruning, is none."""
        found = self._walk()
        before = {place.param: place for place in self._places}
        names = {place.name for place in self._places}
        lent = [name for name, param in found.items() if not isinstance(param, nn.Parameter)]
        places = [place for place in self._places if place.name in lent]
        for name, param in found.items():
            if not isinstance(param, nn.Parameter):
                continue
            if param in before:
                places.append(replace(before.pop(param), name=name))
            elif param.requires_grad:
                return f"parameter {name} was {'replaced' if name in names else 'added'}"
            else:
                places.append(_place(name, param))
        for place in before.values():
            if place.trained and place.name not in lent:
                return f"parameter {place.name} was {'replaced' if place.name in found else 'removed'}"
        self._places, self._lent = places, lent
        self._take_in()
        return ""

    def _take_in(self) -> None:
        tables = ((module._modules, module._parameters, module._buffers) for module in self._module.modules())
        self._tables: list[Mapping[str, object]] = list(chain.from_iterable(tables))
        self._entries = self._read()
        self.buffers = buffers_of(self._module, self._ignored)


def _place(name: str, param: nn.Parameter) -> Place:
    return Place(name, param, param.requires_grad, param.dtype, param.device, param.shape)


def _change(place: Place) -> str:
    """What has happened to a parameter that is not what it was; "" if it is frozen now."""
    name, param = place.name, place.param
    if param.dtype is not place.dtype:
        return f"parameter {name} changed from {place.dtype} to {param.dtype}"
    if param.device != place.device:
        return f"parameter {name} moved from {place.device} to {param.device}"
    if param.shape != place.shape:
        return f"parameter {name} changed from {list(place.shape)} to {list(param.shape)}"
    return "" if place.trained else f"parameter {name} was unfrozen"

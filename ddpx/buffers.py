"""One rank's values for everybody: parameters and buffers once, buffers again before each training forward."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddpx.communicator import Communicator
from ddpx.errors import ParametersChanged
from ddpx.execute import Plan

BATCH_BYTES = 32 << 20
ALIGN_BYTES = 16  # so that any dtype can be viewed in a packed buffer


class Packed:
    """Tensors packed, one behind the other, in a flat buffer of bytes."""

    def __init__(self, tensors: Sequence[Tensor], staging: Tensor) -> None:
        self.places: list[tuple[Tensor, Tensor]] = []  # (tensor, its packed twin)
        begin = 0
        for tensor in tensors:
            end = begin + tensor.nbytes
            self.places.append((tensor, staging[begin:end].view(tensor.dtype).view(tensor.shape)))
            begin = _aligned(end)

    def pack(self) -> None:
        for tensor, twin in self.places:
            twin.copy_(tensor.data)

    def unpack(self) -> None:
        # Through .data, so that autograd does not count it as a change: a graph of an earlier forward may need the old
        # version number, and what it saved is replaced by the same or newer statistics only.
        for tensor, twin in self.places:
            tensor.data.copy_(twin)


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def broadcast(communicator: Communicator, tensors: Sequence[Tensor], root: int = 0) -> None:
    """Make `tensors` bitwise the root's on every rank, whatever their types and strides. A collective."""
    batches: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if batches[-1] and packed_bytes([*batches[-1], tensor]) > BATCH_BYTES:
            batches.append([])
        batches[-1].append(tensor)
    largest = max(packed_bytes(batch) for batch in batches)
    if communicator.group.world_size == 1 or not largest:
        return
    staging = communicator.empty(largest, torch.uint8)
    for batch in batches:
        plan = communicator.plan_broadcast(staging[: packed_bytes(batch)], root)
        _share(communicator, Packed(batch, staging), plan, root)
    communicator.release(staging)


def _share(communicator: Communicator, packed: Packed, plan: Plan, root: int) -> None:
    source = communicator.group.rank == root
    if source:
        packed.pack()
    communicator.wait(communicator.start(plan.run))
    if not source:
        packed.unpack()


class BufferSync:
    """The module's buffers, as rank 0 has them, on every rank. Constructing it is a collective; so is `run`.

    Buffers are looked up by place each time, since a module may replace them.
    """

    def __init__(self, communicator: Communicator, module: nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        self._communicator = communicator
        self._places = []
        seen: set[int] = set()
        for prefix, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is not None and id(buffer) not in seen and name not in ignored:
                    seen.add(id(buffer))
                    self._places.append((owner, key))
        self._bound: tuple[list[Tensor], Packed] | None = None
        self._plans: dict[int, Plan] = {}  # by root
        self._staging = communicator.empty(packed_bytes(self._tensors()), torch.uint8)

    def _tensors(self) -> list[Tensor]:
        found = [owner._buffers[key] for owner, key in self._places]
        return [tensor for tensor in found if tensor is not None]

    def run(self, root: int = 0) -> None:
        if self._communicator.group.world_size == 1:
            return
        tensors = self._tensors()
        if self._bound is None or not _same(tensors, self._bound[0]):
            if packed_bytes(tensors) > self._staging.nbytes:
                raise ParametersChanged(
                    f"rank {self._communicator.group.rank}: the module's buffers have grown after wrapping, from "
                    f"{self._staging.nbytes} bytes to {packed_bytes(tensors)}. Buffers keep their size and type."
                )
            self._bound = (tensors, Packed(tensors, self._staging))
        if root not in self._plans:
            self._plans[root] = self._communicator.plan_broadcast(self._staging, root)
        _share(self._communicator, self._bound[1], self._plans[root], root)


def _same(now: Sequence[Tensor], then: Sequence[Tensor]) -> bool:
    return len(now) == len(then) and all(new is old for new, old in zip(now, then, strict=True))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES

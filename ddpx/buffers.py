"""One rank's values for everybody: parameters and buffers once, buffers again before each training forward."""

import zlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ddpx.communicator import Communicator
from ddpx.execute import Plan, without_end_waits
from ddpx.transport import DIGEST_BITS

BATCH_BYTES = 32 << 20
ALIGN_BYTES = 16  # so that any dtype can be viewed in a packed buffer


class Packed:
    """Tensors packed, one behind the other, in a flat buffer of bytes."""

    def __init__(self, tensors: Sequence[Tensor], staging: Tensor) -> None:
        self._tensors = list(tensors)
        self._twins: list[Tensor] = []  # packed
        begin = 0
        for tensor in tensors:
            end = begin + tensor.nbytes
            self._twins.append(staging[begin:end].view(tensor.dtype).view(tensor.shape))
            begin = _aligned(end)

    def pack(self) -> None:
        torch._foreach_copy_(self._twins, [tensor.data for tensor in self._tensors])

    def unpack(self) -> None:
        # Through .data, so that autograd does not count it as a change: a graph of an earlier forward may need the old
        # version number, and what it saved is replaced by the same or newer statistics only.
        torch._foreach_copy_([tensor.data for tensor in self._tensors], self._twins)


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
        communicator.settle()
    communicator.release(staging)


def _share(communicator: Communicator, packed: Packed, plan: Plan, root: int) -> None:
    """The root does not wait until its values have been read: that is for `settle`."""
    source = communicator.group.rank == root
    if source:
        packed.pack()
    communicator.wait(communicator.run(without_end_waits(plan)))
    if not source:
        packed.unpack()


class BufferSync:
    """The module's buffers, as one rank has them, on every rank. Constructing it is a collective; so is `run`.

    Which they are may change between forwards, alike on all ranks. Note: agreement. Each rank leaves a description of
    its buffers on the board when that changes, and enters epochs with a digest of it in the header. So ranks that
    differ find out before anything is copied, and can say in which buffer.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._tensors: list[tuple[Tensor, torch.Size, torch.dtype]] = []
        self._described: dict[str, str] = {}
        self._digest = 0
        self._packed: Packed | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._plans: dict[int, Plan] = {}  # by root
        self._agreement = communicator.plan_all_reduce(communicator.empty(1, torch.int32))

    def look(self, buffers: Mapping[str, Tensor]) -> int:
        """Take in what the buffers are now. Returns their digest, for the header; 0 for none."""
        if not _same(buffers.values(), self._tensors):
            self._tensors = [(tensor, tensor.shape, tensor.dtype) for tensor in buffers.values()]
            self._packed = None
            described = {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in buffers.items()}
            if list(described.items()) != list(self._described.items()):
                self._described = described
                self._communicator.group.leave("buffers", described)
                self._digest = _digest(described)
        return self._digest

    def run(self, root: int = 0) -> None:
        """Share what `look` has seen, in an epoch that all ranks have entered with the same digest.

        Before the next epoch, the communicator is to settle.
        """
        if self._communicator.group.world_size == 1:
            return
        if self._packed is None:
            self._packed = self._pack([tensor for tensor, _, _ in self._tensors])
        if root not in self._plans:
            nbytes = packed_bytes([tensor for tensor, _, _ in self._tensors])
            self._plans[root] = self._communicator.plan_broadcast(self._staging[:nbytes], root)
        _share(self._communicator, self._packed, self._plans[root], root)

    def _pack(self, tensors: Sequence[Tensor]) -> Packed:
        nbytes = packed_bytes(tensors)
        if nbytes > self._staging.nbytes:
            communicator = self._communicator
            communicator.wait(communicator.start(self._agreement.run))  # or else ranks would allocate differently
            if self._staging.nbytes:
                communicator.release(self._staging)
            self._staging = communicator.empty(max(nbytes, 2 * self._staging.nbytes), torch.uint8)
        self._plans = {}
        return Packed(tensors, self._staging)


def _same(now: Collection[Tensor], then: Sequence[tuple[Tensor, torch.Size, torch.dtype]]) -> bool:
    return len(now) == len(then) and all(
        tensor is old and tensor.shape == shape and tensor.dtype is dtype
        for tensor, (old, shape, dtype) in zip(now, then, strict=True)
    )


def _digest(described: Mapping[str, str]) -> int:
    return 1 + zlib.crc32(repr(described).encode()) % ((1 << DIGEST_BITS) - 1) if described else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES

"""The compiled interpreter of a mapped plan: one call without the GIL, where the library was built.

Everything works without it (`ddpx.execute` runs the same operations through torch); it saves Python between operations
and adds n sources in one pass over memory.
"""

import ctypes
import importlib.util
import time
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from ddpx.operations import Combine, Copy, Hold, Operation, Publish, Wait
from ddpx.transport import MappedTransport
from ddpx.transport.shared_memory import HEADERS, SLICE_S, SharedMemory

_WAIT, _PUBLISH, _HOLD, _COPY, _SUM_F32, _SUM_F64, _SUM_BF16, _SUM_F16 = range(8)
_SUMS = {
    torch.float32: _SUM_F32,
    torch.float64: _SUM_F64,
    torch.bfloat16: _SUM_BF16,
    torch.float16: _SUM_F16,
}


class _Operation(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("source", ctypes.POINTER(ctypes.c_void_p)),
        ("sources", ctypes.c_int64),
        ("peer", ctypes.c_int64),
        ("header", ctypes.c_void_p),
    )


class _Outcome(ctypes.Structure):
    _fields_ = (("wait_ns", ctypes.c_int64), ("longest_ns", ctypes.c_int64), ("last_peer", ctypes.c_int64))


def load() -> ctypes.CDLL | None:
    """The library built with the package, or None.

    In a checkout it may be older than its source, and would then read operations as they were: it is left alone.
    """
    spec = importlib.util.find_spec("ddpx._native")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    source = Path(__file__).with_name("_native.c")
    built_from = getattr(library, "ddpx_source", int)() & 0xFFFFFFFF
    if source.exists() and built_from != zlib.crc32(source.read_bytes()):
        warnings.warn(f"{spec.origin} was built from another {source.name}: install ddpx again", stacklevel=2)
        return None
    library.ddpx_run.restype = ctypes.c_int64
    library.ddpx_run.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    return library


LIBRARY = load()


def compile_operations(transport: MappedTransport, operations: Sequence[Operation], ticks: int) -> "NativePlan | None":
    """A plan in one call, or None when the library is missing or does not know one of the operations."""
    if LIBRARY is None or not isinstance(transport, SharedMemory):
        return None
    known = all(
        operation.operation == "sum"
        and operation.out.dtype in _SUMS
        and (operation.out.dtype != torch.float16 or LIBRARY.ddpx_has_f16())
        for operation in operations
        if isinstance(operation, Combine)
    )
    return NativePlan(LIBRARY, transport, operations, ticks) if known else None


class NativePlan:
    """The operations as an array the library reads; memory they name is kept alive here."""

    def __init__(
        self, library: ctypes.CDLL, transport: SharedMemory, operations: Sequence[Operation], ticks: int
    ) -> None:
        self._run = library.ddpx_run
        self._transport = transport
        self._ticks = ticks
        self.bytes_read = 0  # from peers, in a run
        self._operations = list(operations)
        self._keep: list[object] = []
        self._array = (_Operation * len(operations))(*map(self._encode, operations))
        self._count = len(operations)
        self._outcome = _Outcome()

    def _encode(self, operation: Operation) -> _Operation:
        transport = self._transport
        match operation:
            case Wait(peer, tick):
                clock, headers, _ = transport.addresses(peer)
                sleeping = self._addresses([transport.addresses(transport.rank)[2]])
                return _Operation(_WAIT, tick, clock, sleeping, 1, peer, headers)
            case Publish(tick):
                peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
                sleeping = self._addresses([transport.addresses(peer)[2] for peer in peers])
                return _Operation(_PUBLISH, tick, transport.addresses(transport.rank)[0], sleeping, len(peers))
            case Hold(seconds):
                return _Operation(_HOLD, int(seconds * 1e9))
            case Copy(out, source):
                return _Operation(_COPY, out.nbytes, out.data_ptr(), self._pointers([source]), 1)
            case Combine(out, sources, _):
                return _Operation(_SUMS[out.dtype], out.numel(), out.data_ptr(), self._pointers(sources), len(sources))

    def _pointers(self, tensors: Sequence[torch.Tensor]) -> "ctypes._Pointer[ctypes.c_void_p]":
        return self._addresses([tensor.data_ptr() for tensor in tensors])

    def _addresses(self, addresses: Sequence[int]) -> "ctypes._Pointer[ctypes.c_void_p]":
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._keep.append(array)
        return ctypes.cast(array, ctypes.POINTER(ctypes.c_void_p))

    @property
    def peer_wait_s(self) -> float:
        return self._outcome.wait_ns * 1e-9

    @property
    def last_peer(self) -> int:
        return self._outcome.last_peer

    def run(self) -> None:
        transport, count = self._transport, self._count
        base = transport.start()
        outcome = self._outcome
        outcome.wait_ns, outcome.longest_ns, outcome.last_peer = 0, 0, transport.rank
        header = transport.header()
        spin_ns, slice_ns = int(transport.spin_s * 1e9), int(SLICE_S * 1e9)
        position = 0
        while True:
            position = self._run(
                self._array, position, count, base, header, HEADERS, spin_ns, slice_ns, ctypes.byref(outcome)
            )
            if position == count:
                break
            stopped = self._operations[position]
            assert isinstance(stopped, Wait)
            before = time.perf_counter_ns()
            transport.wait(stopped.peer, base + stopped.tick)  # raises, or waits on with an eye on everybody
            waited_ns = time.perf_counter_ns() - before
            outcome.wait_ns += waited_ns
            if waited_ns > outcome.longest_ns:
                outcome.longest_ns, outcome.last_peer = waited_ns, stopped.peer
            position += 1
        transport.bytes_read += self.bytes_read
        transport.clock = base + self._ticks

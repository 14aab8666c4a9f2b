"""The compiled interpreter of a mapped plan: one call without the GIL, where the library was built.

Everything works without it (`ddpx.execute` runs the same operations through torch); it saves Python between operations
and adds n sources in one pass over memory.
"""

import ctypes
import time
from collections.abc import Sequence

import torch

from ddpx.compiled import LIBRARY
from ddpx.operations import Claim, Combine, Copy, Hold, Operation, Publish, Release, Wait, end_waits
from ddpx.transport import MappedTransport
from ddpx.transport.shared_memory import HEADERS, SLICE_S, SharedMemory

_WAIT, _PUBLISH, _HOLD, _CLAIM, _RELEASE, _COPY, _SUM_F32, _SUM_F64, _SUM_BF16, _SUM_F16 = range(10)
_SUMS = {
    torch.float32: _SUM_F32,
    torch.float64: _SUM_F64,
    torch.bfloat16: _SUM_BF16,
    torch.float16: _SUM_F16,
}


# The last-level cache. What all ranks together write beyond it is not there any more when it is read.
CACHE_BYTES = (LIBRARY.ddpx_cache_bytes() if LIBRARY is not None else 0) or 16 << 20


class _Operation(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("source", ctypes.POINTER(ctypes.c_void_p)),
        ("sources", ctypes.c_int64),
        ("peer", ctypes.c_int64),
        ("header", ctypes.c_void_p),
        ("also", ctypes.POINTER(ctypes.c_void_p)),
        ("alsos", ctypes.c_int64),
        ("past_caches", ctypes.c_int64),
    )


class _Outcome(ctypes.Structure):
    _fields_ = (("wait_ns", ctypes.c_int64), ("longest_ns", ctypes.c_int64), ("last_peer", ctypes.c_int64))


def compile_operations(transport: MappedTransport, operations: Sequence[Operation], ticks: int) -> "NativePlan | None":
    """A plan in one call, or None when the library is missing or does not know one of the operations."""
    if LIBRARY is None or not isinstance(transport, SharedMemory):
        return None
    known = all(knows(step.operation, step.out.dtype) for step in operations if isinstance(step, Combine))
    return NativePlan(LIBRARY, transport, operations, ticks) if known else None


def knows(operation: str, dtype: torch.dtype) -> bool:
    """Whether the library is there and combines this type by this operation."""
    if LIBRARY is None or operation != "sum":
        return False
    return dtype in _SUMS and (dtype != torch.float16 or bool(LIBRARY.ddpx_has_f16()))


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
        self._ends = end_waits(operations)
        self._outcome = _Outcome()

    def _encode(self, operation: Operation) -> _Operation:
        transport = self._transport
        mine = transport.addresses(transport.rank)
        peers = [transport.addresses(rank) for rank in range(transport.world_size) if rank != transport.rank]
        match operation:
            case Wait(peer, tick):
                theirs = transport.addresses(peer)
                return _Operation(_WAIT, tick, theirs.clock, self._addresses([mine.sleep]), 1, peer, theirs.headers)
            case Publish(tick):
                sleeping = self._addresses([words.sleep for words in peers])
                return _Operation(_PUBLISH, tick, mine.clock, sleeping, len(peers))
            case Claim():
                return _Operation(_CLAIM, 0, mine.writing, self._addresses([words.shut for words in peers]), len(peers))
            case Release():
                return _Operation(_RELEASE, 0, mine.writing)
            case Hold(seconds):
                return _Operation(_HOLD, int(seconds * 1e9))
            case Copy(out, source):
                return _Operation(_COPY, out.nbytes, out.data_ptr(), self._pointers([source]), 1)
            case Combine(out, sources, _, also, past_caches):
                encoded = _Operation(
                    _SUMS[out.dtype], out.numel(), out.data_ptr(), self._pointers(sources), len(sources)
                )
                encoded.also, encoded.alsos, encoded.past_caches = self._pointers(also), len(also), past_caches
                return encoded

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
        self._run_first(self._count)

    def run_through(self) -> None:
        base = self._run_first(self._count - len(self._ends))
        for wait in self._ends:
            self._transport.owe(wait.peer, base + wait.tick)

    def _run_first(self, count: int) -> int:
        """Run the first `count` operations. Returns the clock at the start."""
        transport = self._transport
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
            if isinstance(stopped, Claim):
                transport.refused()
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
        return base

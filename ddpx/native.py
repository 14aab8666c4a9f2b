"""The compiled interpreter of a mapped plan: one call without the GIL, where the library was built.

Everything works without it (`ddpx.execute` runs the same operations through torch); it saves Python between operations
and adds n sources in one pass over memory.
"""

import ctypes
import time
from collections.abc import Sequence

import torch

from ddpx.compiled import LIBRARY, Encoded, Kind, Outcome
from ddpx.operations import Claim, Combine, Copy, Hold, Operation, Publish, Release, Wait, end_waits
from ddpx.transport import MappedTransport
from ddpx.transport.shared_memory import HEADERS, SLICE_S, SharedMemory

SUMS = {
    torch.float32: Kind.SUM_F32,
    torch.float64: Kind.SUM_F64,
    torch.bfloat16: Kind.SUM_BF16,
    torch.float16: Kind.SUM_F16,
}

# The last-level cache. What all ranks together write beyond it is not there any more when it is read.
CACHE_BYTES = (LIBRARY.ddpx_cache_bytes() if LIBRARY is not None else 0) or 16 << 20


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
    return dtype in SUMS and (dtype != torch.float16 or bool(LIBRARY.ddpx_has_f16()))


class Encoder:
    """Writes operations as the library reads them, and keeps what they point at."""

    def __init__(self) -> None:
        self._keep: list[object] = []

    def compute(self, operation: Copy | Combine) -> Encoded:
        self._keep.append(operation)
        match operation:
            case Copy(out, source):
                return Encoded(Kind.COPY, out.nbytes, out.data_ptr(), self._pointers([source]), 1)
            case Combine(out, sources, _, also, past_caches):
                written = Encoded(SUMS[out.dtype], out.numel(), out.data_ptr(), self._pointers(sources))
                written.sources, written.past_caches = len(sources), past_caches
                written.also, written.alsos = self._pointers(also), len(also)
                return written

    def addresses(self, addresses: Sequence[int]) -> "ctypes._Pointer[ctypes.c_void_p]":
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._keep.append(array)
        return ctypes.cast(array, ctypes.POINTER(ctypes.c_void_p))

    def _pointers(self, tensors: Sequence[torch.Tensor]) -> "ctypes._Pointer[ctypes.c_void_p]":
        return self.addresses([tensor.data_ptr() for tensor in tensors])


class Waiting:
    """How long a plan's last run waited for peers, and for whom longest, as the library counts."""

    def __init__(self) -> None:
        self._outcome = Outcome()

    @property
    def peer_wait_s(self) -> float:
        return self._outcome.wait_ns * 1e-9

    @property
    def last_peer(self) -> int:
        return self._outcome.last_peer

    def _nothing_yet(self, rank: int) -> Outcome:
        outcome = self._outcome
        outcome.wait_ns, outcome.longest_ns, outcome.last_peer = 0, 0, rank
        return outcome


class NativePlan(Waiting):
    """The operations as an array the library reads; memory they name is kept alive here."""

    def __init__(
        self, library: ctypes.CDLL, transport: SharedMemory, operations: Sequence[Operation], ticks: int
    ) -> None:
        super().__init__()
        self._run = library.ddpx_run
        self._transport = transport
        self._ticks = ticks
        self.bytes_read = 0  # from peers, in a run
        self._operations = list(operations)
        self._encoder = Encoder()
        self._array = (Encoded * len(operations))(*map(self._encode, operations))
        self._count = len(operations)
        self._ends = end_waits(operations)

    def _encode(self, operation: Operation) -> Encoded:
        transport = self._transport
        mine = transport.addresses(transport.rank)
        peers = [transport.addresses(rank) for rank in range(transport.world_size) if rank != transport.rank]
        match operation:
            case Wait(peer, tick):
                theirs = transport.addresses(peer)
                return Encoded(
                    Kind.WAIT, tick, theirs.clock, self._encoder.addresses([mine.sleep]), 1, peer, theirs.headers
                )
            case Publish(tick):
                sleeping = self._encoder.addresses([words.sleep for words in peers])
                return Encoded(Kind.PUBLISH, tick, mine.clock, sleeping, len(peers))
            case Claim():
                return Encoded(
                    Kind.CLAIM, 0, mine.writing, self._encoder.addresses([words.shut for words in peers]), len(peers)
                )
            case Release():
                return Encoded(Kind.RELEASE, 0, mine.writing)
            case Hold(seconds):
                return Encoded(Kind.HOLD, int(seconds * 1e9))
            case Copy() | Combine():
                return self._encoder.compute(operation)

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
        outcome = self._nothing_yet(transport.rank)
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

"""Ranks of one host read each other's memory in place; one growing number a rank says how far it has come.

A segment is anonymous shared memory (`memfd`): peers open it through /proc/<pid>/fd, so it never has a name, and a
killed job can't leave anything behind. Each rank owns one *control page*, which it writes alone, and any number of
arenas. Where every rank has the compiled helper, peers deliver sums into these.

Note: deliveries. A rank that is late, or stopped by a signal, must not write into the gradients of a step that its
peers have given up. So it says on its page that it writes, then looks whether somebody has shut their memory for this
epoch; who leaves an epoch by a failure shuts first, then waits until nobody writes. Each looks after it has spoken, so
one of them sees the other. A refused claim means a failure: plans end by waiting for every delivery to their rank, so
who shuts a later epoch has let all of this one pass.

Note: the clock. `epoch << 32 | ticks`, written by its rank alone. Ticks grow with every plan that runs; an epoch is one
synchronised backward. A rank that fails says in which epoch, and leaves for the next one, so a peer still waiting
in the failed epoch finds the clock beyond its target *and* the failure, and raises the failing rank's words.

Waiting spins for a few tens of microseconds when every rank has a core of its own, then sleeps in a futex, which
releases the GIL. Who is about to sleep says so on its page first, so that publishing costs a system call only when
somebody sleeps; the kernel looks at the clock again before it lets anybody sleep, so no wake-up is lost. Each slice of
sleep ends with a look at the peer's process (pidfd) and at everybody's failure word.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import secrets
import struct
import time
import warnings
from dataclasses import dataclass

import torch

from ddpx.compiled import LIBRARY
from ddpx.errors import DeadlineExceeded, Error, Mismatch, PeerFailed, PeerLost
from ddpx.group import Group
from ddpx.processes import this_host
from ddpx.transport import header_mismatch

LINE = 128  # bytes: two cache lines, since processors fetch them in pairs
PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
TOKEN_AT, CLOCK_AT, FAILED_AT, HEADER_AT, SLEEP_AT, WRITING_AT, SHUT_AT, TEXT_AT = (
    *(LINE * line for line in range(7)),
    PAGE_BYTES,
)
HEADERS = 4  # epochs whose headers stand on a page; a peer is never more than one or two ahead
FAILURES = LINE // 8  # epochs whose failures do; a peer gets ahead by failing again and again
TEXT_BYTES = 4096  # words of one failure
SPIN_S = 30e-6
SLICE_S = 0.05  # the longest sleep between two looks at the peers
SHUT_S = 100e-6  # between two looks whether anybody still writes here
MAX_TICKS = 1 << 32

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


def host_id() -> str:
    """Equal for ranks that may share memory: boot and process namespace, or DDPX_HOST_ID where set by hand."""
    return os.environ.get("DDPX_HOST_ID") or this_host()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer finds a segment, and which file it is: the number means another one when the segment is closed."""

    pid: int
    fd: int
    file: tuple[int, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Words:
    """Where the words on a rank's control page lie in this process."""

    clock: int
    headers: int
    sleep: int
    writing: int
    shut: int


class Segment:
    """Anonymous shared memory: made by one rank, mapped by all."""

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.fd = fd
        self.nbytes = nbytes
        self.memory = mmap.mmap(fd, nbytes, access=access)
        if nbytes >= HUGE_BYTES:
            with contextlib.suppress(OSError, AttributeError):
                self.memory.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, nbytes: int) -> "Segment":
        size = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("ddpx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # A sealed size: no rank can shrink what another has mapped, which would kill that one with SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, size, writable=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, address: Address, writable: bool) -> "Segment":
        access = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", access | os.O_CLOEXEC)
        try:
            if _file_of(fd) != address.file:
                raise FileNotFoundError(errno.ENOENT, "its rank has closed it")
            return cls(fd, address.nbytes, writable)
        finally:
            os.close(fd)

    def address(self) -> Address:
        return Address(os.getpid(), self.fd, _file_of(self.fd), self.nbytes)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(self.memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def close_fd(self) -> None:
        """Mappings stay; from here on nobody else can open the segment."""
        os.close(self.fd)


class _ControlPage:
    """A rank's clock, failure and words, as its peers see them."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words = memoryview(segment.memory)[:PAGE_BYTES].cast("Q")
        self.clock_address = _address_of(segment.memory) + CLOCK_AT

    @property
    def clock(self) -> int:
        return self.words[CLOCK_AT // 8]

    def failed(self, epoch: int) -> bool:
        """Whether its rank failed in `epoch`; or in a later one so far ahead that it must have."""
        return self.words[FAILED_AT // 8 + epoch % FAILURES] > epoch

    def header(self, epoch: int) -> int | None:
        """What its rank entered `epoch` with; None when that is not known, or no longer."""
        at = HEADER_AT // 8 + 2 * (epoch % HEADERS)
        header = self.words[at]
        return header if self.words[at + 1] == epoch else None

    @property
    def entered(self) -> int:
        """The last epoch that its rank entered with a header."""
        return max(self.words[HEADER_AT // 8 + 2 * slot + 1] for slot in range(HEADERS))

    @property
    def writing(self) -> bool:
        """Whether its rank is writing into its peers' memory."""
        return self.words[WRITING_AT // 8] != 0

    def write_header(self, epoch: int, header: int) -> None:
        at = HEADER_AT // 8 + 2 * (epoch % HEADERS)
        self.words[at] = header
        self.words[at + 1] = epoch

    def text(self, epoch: int) -> str:
        at = TEXT_AT + epoch % FAILURES * TEXT_BYTES
        (length,) = struct.unpack_from("<Q", self.segment.memory, at)
        return bytes(self.segment.memory[at + 8 : at + 8 + length]).decode(errors="replace")

    def write_failure(self, epoch: int, text: str) -> None:
        at = TEXT_AT + epoch % FAILURES * TEXT_BYTES
        encoded = text.encode()[: TEXT_BYTES - 8]
        self.segment.memory[at + 8 : at + 8 + len(encoded)] = encoded
        struct.pack_into("<Q", self.segment.memory, at, len(encoded))
        self.words[FAILED_AT // 8 + epoch % FAILURES] = epoch + 1


class SharedMemory:
    """The mapped transport of one host. Constructing it and `empty` are collectives.

    Raises Error on every rank when one of them can't map another's memory, with the reason.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.timeout_s = group.timeout_s
        self.clock = 0
        self.bytes_read = 0  # from peers, or written here by them; counted by the plans as they run
        self.last_peer = self.rank  # the peer that the last blocking wait was for
        self.scratch: torch.Tensor | None = None
        self.delivers = False
        self._failure: Error | None = None  # what ended a plan in this epoch
        self._owed: dict[int, int] = {}  # peer -> the clock it has to reach before this rank's memory is its own again
        self._broken: Error | None = None  # what makes all epochs impossible from here on
        self._failed_epoch = -2  # the last one in which this rank failed
        self._arenas: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self.spin_s = SPIN_S if group.world_size <= len(os.sched_getaffinity(0)) else 0.0
        token = secrets.token_bytes(16)
        own = Segment.create(TEXT_AT + FAILURES * TEXT_BYTES)
        own.memory[TOKEN_AT : TOKEN_AT + 16] = token
        segments = self._share("control page", own, host_id(), token)
        self._pages = [_ControlPage(segment) for segment in segments]
        self._own = self._pages[self.rank]
        for peer in range(self.world_size):
            group.is_dead(peer)  # opens what later looks need, before there are two threads
        self.delivers = all(group.gather("compiled helpers", LIBRARY is not None))

    def _share(self, what: str, own: Segment, host: str = "", token: bytes = b"") -> list[Segment]:
        """Everyone's segment, in rank order, or Error on all ranks alike."""
        try:
            notes = self.group.gather(f"share {what}", (host, own.address(), token))
            segments, problem = [], ""
            for peer, (their_host, address, their_token) in enumerate(notes):
                try:
                    if their_host != host:
                        raise OSError(f"it is on another host ({their_host} and {host})")
                    segment = own if peer == self.rank else Segment.open(address, self.delivers)
                    if segment.memory[TOKEN_AT : TOKEN_AT + len(their_token)] != their_token:
                        raise OSError("another process has that number in this namespace")
                    segments.append(segment)
                except OSError as error:
                    problem = f"{self._name()} cannot map the {what} of {self._name(peer)}: {error}"
                    break
            problems = [text for text in self.group.gather(f"mapped {what}", problem) if text]
        finally:
            own.close_fd()
        if problems:
            self.group.look()  # a peer that heard of a failure has left, and closed its segment
            raise Error(f"shared memory does not join these ranks: {problems[0]}. Use transport='process_group'.")
        return segments

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            raise ValueError(f"shared memory holds CPU tensors, not {device}")
        nbytes = numel * dtype.itemsize
        try:
            own = Segment.create(nbytes)
        except OSError as error:
            message = f"{self._name()} got no {nbytes / 2**20:.1f} MiB of shared memory: {error}"
            self.group.announce(message)
            raise Error(message) from error
        # New pages are zero, and become resident when they are written: in the round that lays an arena out, one by one
        # as the gradients that they take the place of go.
        tensors = [segment.tensor(numel, dtype) for segment in self._share("arena", own)]
        self._arenas.append((tensors[self.rank], tensors))
        return tensors[self.rank]

    def peers(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if not flat.numel():  # without an address
            return [flat] * self.world_size
        start = flat.data_ptr()
        for own, tensors in self._arenas:
            begin = start - own.data_ptr()
            if begin >= 0 and begin + flat.nbytes <= own.nbytes:
                end = begin + flat.nbytes
                return [tensor.view(torch.uint8)[begin:end].view(flat.dtype) for tensor in tensors]
        raise ValueError("this tensor does not lie in memory of this transport: allocate it with empty()")

    def release(self, flat: torch.Tensor) -> None:
        """Forget an arena from `empty`; its memory goes when the last tensor on it does."""
        self._arenas = [(own, tensors) for own, tensors in self._arenas if own.data_ptr() != flat.data_ptr()]

    # Epochs and failures

    def begin(self, epoch: int, header: int | None) -> None:
        """Enter an epoch. `header` is what all ranks must have in common in it; peers compare on their first wait.

        None: this rank enters only to say that it failed, and until it has, peers wait.
        """
        if self._broken is not None:
            raise self._broken
        if header is not None:
            self._own.write_header(epoch, header)
        self.clock = epoch << 32
        self._failure = None
        self._owed = {}

    def fail(self, message: str) -> None:
        """Tell everybody that this rank failed in its present epoch, and why."""
        self._failed_epoch = self.clock >> 32
        self._own.write_failure(self._failed_epoch, message)
        self._wake()

    def shut(self) -> None:
        """Let no peer write into this rank's memory in its present epoch any more, and return when none does.

        A peer that stays in the middle of writing, stopped by a signal, makes every later epoch impossible instead.
        """
        if not self.delivers or LIBRARY is None:
            return
        LIBRARY.ddpx_shut(self.addresses(self.rank).shut, (self.clock >> 32) + 1)
        deadline = time.monotonic() + self.timeout_s
        for peer, page in enumerate(self._pages):
            while peer != self.rank and page.writing and not self.group.is_dead(peer):
                if time.monotonic() > deadline:
                    self._broken = DeadlineExceeded(
                        f"{self._name(peer)} has been writing a sum into the memory of {self._name()} for "
                        f"{self.timeout_s:.0f} s: its process is stopped. Start the job again."
                    )
                    return
                time.sleep(SHUT_S)

    def refused(self) -> None:
        """Raise what made a peer shut its memory in the present epoch."""
        try:
            self.poll()
            raise PeerFailed(f"a peer of {self._name()} has given up the present step and does not say why")
        except Error as error:
            self._failure = error
            raise

    def poll(self) -> None:
        """Raise PeerFailed if a rank failed in the present epoch; this one too, so that its own waits end."""
        epoch = self.clock >> 32
        epochs = [epoch]
        if epoch and self._failed_epoch != epoch - 1:  # a peer may have failed at its very end, when we were through
            epochs.append(epoch - 1)
        for epoch in epochs:
            for page in self._pages:
                if page.failed(epoch):
                    raise PeerFailed(page.text(epoch))

    def absent(self) -> list[int]:
        """The ranks that have not entered this rank's present epoch."""
        epoch = self.clock >> 32
        return [rank for rank, page in enumerate(self._pages) if max(page.clock >> 32, page.entered) < epoch]

    def disconnect(self) -> None:
        """Nothing to close: the next epoch's clock leaves this one behind."""

    def is_stranded(self) -> bool:
        """Never: every wait looks whether this rank has failed."""
        return False

    # The clock

    def publish(self, clock: int) -> None:
        self._own.words[CLOCK_AT // 8] = clock
        self._wake()

    def header(self) -> int:
        """What this rank entered its present epoch with."""
        return self._own.header(self.clock >> 32) or 0

    def addresses(self, rank: int) -> Words:
        page = self._pages[rank].clock_address - CLOCK_AT
        return Words(page + CLOCK_AT, page + HEADER_AT, page + SLEEP_AT, page + WRITING_AT, page + SHUT_AT)

    def _wake(self) -> None:
        if _FUTEX_CALL is not None:  # always: Python has no fence between the clock's write and a look at who sleeps
            _libc.syscall(_FUTEX_CALL, ctypes.c_void_p(self._own.clock_address), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def start(self) -> int:
        if self._failure is not None:
            raise self._failure
        return self.clock

    def owe(self, peer: int, clock: int) -> None:
        self._owed[peer] = clock  # of all plans in this epoch: clocks grow

    def settle(self) -> None:
        """Make the waits that plans of this epoch have put off."""
        owed, self._owed = self._owed, {}
        for peer, clock in owed.items():
            self.wait(peer, clock)

    def wait(self, peer: int, clock: int) -> None:
        try:
            self._wait(peer, clock)
        except Error as error:
            self._failure = error
            raise

    def _wait(self, peer: int, clock: int) -> None:
        words = self._pages[peer].words
        at = CLOCK_AT // 8
        if words[at] < clock:
            self.last_peer = peer
            if self.spin_s:
                until = time.perf_counter() + self.spin_s
                while words[at] < clock and time.perf_counter() < until:
                    pass
            if words[at] < clock:
                self._sleep_until(peer, clock)
        seen = words[at]
        if seen >> 32 != clock >> 32:
            # The peer is in a later epoch: either it finished this one, or it failed in it (see Note: the clock).
            self.poll()
        self._compare_headers(peer)

    def _sleep_until(self, peer: int, clock: int) -> None:
        page = self._pages[peer]
        deadline = time.monotonic() + self.timeout_s
        try:
            self._sleep_in_slices(peer, page, clock, deadline)
        finally:
            self._own.words[SLEEP_AT // 8] = 0

    def _sleep_in_slices(self, peer: int, page: _ControlPage, clock: int, deadline: float) -> None:
        while True:
            self._own.words[SLEEP_AT // 8] = 1
            seen = page.clock
            if seen >= clock:
                return
            self.poll()
            self._compare_headers(peer)  # a peer that entered another collective may never come to this one
            if self.group.is_dead(peer) and page.clock < clock:
                raise PeerLost(
                    f"{self._name(peer)} is gone: its process ended while {self._name()} waited for it. "
                    "Its own output says why; the job has to be started again."
                )
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._name()} waited {self.timeout_s:.0f} s for {self._name(peer)}, which is alive but did not "
                    "come. It may be in other code, or make fewer steps than its peers."
                )
            _futex_wait(page.clock_address, seen & 0xFFFFFFFF, SLICE_S)

    def _compare_headers(self, peer: int) -> None:
        epoch = self.clock >> 32
        theirs, mine = self._pages[peer].header(epoch), self._own.header(epoch)
        if theirs is not None and mine is not None and theirs != mine:
            raise Mismatch(header_mismatch(self.group, mine, peer, theirs))

    def _name(self, rank: int | None = None) -> str:
        """Of a rank, this one by default, in words: as the whole group numbers it where this is one host of several."""
        return f"rank {self.group.known_as(self.rank if rank is None else rank)}"

    def close(self) -> None:
        """Let go of the peers; tensors that still live keep their memory."""
        self.group.close()
        self._arenas = []
        self.scratch = None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)


def _futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until woken, at most `seconds`, provided the 32-bit word at `address` still is `expected`."""
    if _FUTEX_CALL is None:
        time.sleep(min(seconds, 0.0005))
        return
    timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    result = _libc.syscall(
        _FUTEX_CALL, ctypes.c_void_p(address), _FUTEX_WAIT, ctypes.c_uint32(expected), ctypes.byref(timeout), None, 0
    )
    if result and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(ctypes.get_errno(), "futex")


def _file_of(fd: int) -> tuple[int, int]:
    """What tells an open file from all others."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _address_of(memory: mmap.mmap) -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()

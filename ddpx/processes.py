"""Which processes the ranks are, so that a wait can end when one of them does.

Each rank writes host, number and start of its process on the board before anything else. Ranks of one host watch each
other through a pidfd, which stays that of the same process even when its number is used again.
"""

import contextlib
import os
import pickle
import platform
import select
from dataclasses import dataclass

import torch.distributed as dist


def this_host() -> str:
    """Equal for processes that see each other by number: boot and process namespace."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{platform.node()} {os.getpid()}"


def started(pid: int) -> str:
    """When that process started, in the kernel's ticks; "" for none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[19]
    return ""


@dataclass(frozen=True, slots=True)
class _Process:
    host: str
    pid: int
    started: str


class Processes:
    """The processes of `world_size` ranks on a board. Not a collective: each is known once it has written itself."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._host = this_host()
        self._watched: dict[int, int | None] = {}  # by rank: a pidfd, or None for one that can't be watched
        self._gone: set[int] = set()
        mine = _Process(self._host, os.getpid(), started(os.getpid()))
        store.set(f"process/{rank}", pickle.dumps(mine))  # type: ignore[arg-type]

    def is_dead(self, rank: int) -> bool:
        """Whether that rank's process is known to have ended."""
        if rank == self._rank:
            return False
        if rank not in self._watched and not self._watch(rank):
            return False
        fd = self._watched[rank]
        if fd is not None:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if poller.poll(0):
                self._gone.add(rank)
        return rank in self._gone

    def _watch(self, rank: int) -> bool:
        """Begin to watch a rank, where it has written itself on the board."""
        if not self._store.check([f"process/{rank}"]):
            return False
        process: _Process = pickle.loads(self._store.get(f"process/{rank}"))
        self._watched[rank] = None
        if process.host != self._host:
            return True
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._gone.add(rank)
        except OSError:  # no such call, or no more files: a deadline has to do
            return True
        else:
            self._watched[rank] = fd
            if started(process.pid) != process.started:
                self._gone.add(rank)
        return True

    def close(self) -> None:
        """Stop watching, until somebody asks again."""
        watched, self._watched = self._watched, {}
        for fd in watched.values():
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)

    __del__ = close

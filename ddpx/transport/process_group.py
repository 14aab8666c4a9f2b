"""Messages over torch.distributed: gloo between CPUs, NCCL between GPUs."""

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpx.errors import Mismatch
from ddpx.group import Group
from ddpx.transport import Message, Posted, header_mismatch
from ddpx.transport.connected import Connected, Post

NO_TAG = 0x7FFFFFFE  # of a message that nobody sends
AT_ONCE = datetime.timedelta(milliseconds=1)


class ProcessGroup(Connected):
    """Each rank sends its header to the next one, in front of an epoch's first message.

    Equality round the ring is equality of all; whoever finds a difference announces it. On CUDA the host would have to
    wait for the value, so there it is not compared.
    """

    # A segment costs a message, about 0.1 ms of wake-ups on two cores, and gains what overlaps: two to four ranks over
    # loopback lose up to a fifth with segments of 1 MiB, and with more than four of them gain nothing.
    segment_bytes = 4 << 20
    segments = 4

    def __init__(self, group: Group, device: torch.device) -> None:
        self._header: torch.Tensor | None = None
        self._tag = 0
        super().__init__(group, device)

    def _make(self, name: str, offers: list[Any]) -> "_Gloo | _Nccl":
        if self.device.type == "cuda":
            return _Nccl(self.group, self.device)
        connections = _Gloo(self.group, name)
        connections.tag = self._tag
        return connections

    def mark(self, number: int, header: int) -> None:
        super().mark(number, header)
        self._tag = header & 0x7FFFFFFF
        if self._connections is not None:
            self._connections.tag = self._tag

    def _say(self, epoch: int, header: int | None) -> None:
        self._header = None
        if header is not None and self.device.type != "cuda" and self.world_size > 1:
            self._header = torch.tensor([epoch, header])

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Posted]:
        if self._header is not None:
            header, self._header = self._header, None
            self._compare_headers(header)
        return super().start(sends, receives)

    def _compare_headers(self, mine: torch.Tensor) -> None:
        theirs = torch.empty_like(mine)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self.exchange([(after, mine)], [(before, theirs)])
        if not torch.equal(mine, theirs):
            message = header_mismatch(self.group, int(mine[1]), before, int(theirs[1]))
            if mine[0] != theirs[0]:  # they will never meet again
                self.group.announce(message)
            raise Mismatch(message)


class _Gloo:
    """A gloo context of our own on the group's store.

    Made directly rather than by new_group, whose names of groups with local synchronisation depend on how many groups
    a rank has made, and are used again after a group was destroyed.
    """

    def __init__(self, group: Group, prefix: str) -> None:
        timeout = datetime.timedelta(seconds=group.timeout_s)
        self.tag = 0
        self._peers = [peer for peer in range(group.world_size) if peer != group.rank]
        self._gloo: Any = dist.ProcessGroupGloo(group.store(prefix), group.rank, group.world_size, timeout)

    def posts(self, sends: Sequence[Message], receives: Sequence[Message]) -> Iterator[Post]:
        for peer, flat in receives:
            yield peer, partial(self._gloo.recv, [flat], peer, self.tag), 0, flat.nbytes
        for peer, flat in sends:
            yield peer, partial(self._gloo.send, [flat], peer, self.tag), flat.nbytes, 0

    def close(self) -> None:
        """End every wait, here and at our peers: gloo closes all connections when one wait runs into its time limit."""
        for peer in self._peers:  # the first whose connection has not been closed already
            try:
                work = self._gloo.recv([torch.empty(1)], peer, NO_TAG)
            except RuntimeError:
                continue
            with contextlib.suppress(RuntimeError):
                work.wait(AT_ONCE)


class _Nccl:
    """A step's messages as one NCCL group on the current stream. Unverified: never run on a GPU yet."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.tag = 0  # nobody asks
        self._ranks = group.ranks
        self._group = dist.new_group(
            group.ranks,
            timeout=datetime.timedelta(seconds=group.timeout_s),
            backend="nccl",
            use_local_synchronization=True,
            device_id=device,
        )

    def posts(self, sends: Sequence[Message], receives: Sequence[Message]) -> Iterator[Post]:
        operations = [dist.P2POp(dist.irecv, flat, self._ranks[peer], self._group) for peer, flat in receives]
        operations += [dist.P2POp(dist.isend, flat, self._ranks[peer], self._group) for peer, flat in sends]
        batch = _Batch(operations)
        for peer, flat in receives:
            yield peer, lambda: batch, 0, flat.nbytes
        for peer, flat in sends:
            yield peer, lambda: batch, flat.nbytes, 0

    def close(self) -> None:
        """Nothing: a device that waits for a lost peer is ended by NCCL's own watchdog."""

    def __del__(self) -> None:
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # Already gone with the default group.
                dist.destroy_process_group(self._group)


class _Batch:
    """All messages of a step, posted together."""

    def __init__(self, operations: list[dist.P2POp]) -> None:
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

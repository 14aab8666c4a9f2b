"""Messages over torch.distributed: gloo between CPUs, NCCL between GPUs.

Our messages travel on connections of our own, so they never interleave with the user's collectives. A wait inside gloo
can't be interrupted; it ends when the peer's connection closes or at the deadline. So a rank that fails first writes
its words on the board and then closes its connections, and whoever loses one reads the board before blaming anybody.
"""

import contextlib
import datetime
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpx.errors import DeadlineExceeded, Mismatch, PeerFailed, PeerLost
from ddpx.group import Group
from ddpx.transport import Landings, header_mismatch

Message = tuple[int, torch.Tensor]  # (peer, flat tensor)
BOARD_S = 0.1  # how long to look for a failing rank's words after a connection closed; they are written before it


class _Works(Protocol):
    def wait(self) -> object: ...


class ProcessGroup:
    """The message transport. Constructing it is a collective; so is the first `begin` after a failure (on CPU)."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.device = device
        self.timeout_s = group.timeout_s
        self.epoch = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_peer = self.rank
        self.tag = 0  # messages of different tags don't meet (over gloo), so that calls of different sizes can't either
        self.landings = Landings()
        self._header: torch.Tensor | None = None
        self._connections: _Gloo | _Nccl | None = self._connect()

    def _connect(self) -> "_Gloo | _Nccl":
        if self.device.type == "cuda":
            return _Nccl(self.group, self.device)
        return _Gloo(self.group, f"messages/{self.epoch}")

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, flat: torch.Tensor) -> None:
        """Nothing to forget: the memory is an ordinary tensor's."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if self._header is not None:
            header, self._header = self._header, None
            self._compare_headers(header)
        self._exchange(sends, receives)

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if not sends and not receives:
            return
        connections = self._connections
        if connections is None:
            raise PeerFailed(f"rank {self.rank} has closed its connections after a failure")
        peer = self.rank
        try:
            longest_s = 0.0
            for peer, work in connections.post(sends, receives, self.tag):
                before = time.perf_counter()
                work.wait()
                waited_s = time.perf_counter() - before
                if waited_s > longest_s:
                    longest_s, self.last_peer = waited_s, peer
        except RuntimeError as error:
            raise self._explain(peer, str(error)) from error
        self.bytes_sent += sum(flat.nbytes for _, flat in sends)
        self.bytes_received += sum(flat.nbytes for _, flat in receives)

    def _explain(self, peer: int, text: str) -> Exception:
        """What really happened when a message did not pass: an announced failure, a lost rank, or a deadline."""
        until = time.monotonic() + BOARD_S
        while True:
            try:
                self.poll()
            except PeerFailed as failure:
                return failure
            except Exception:  # The store is gone, and most likely rank 0 with it.
                break
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        if "imed out" in text:
            return DeadlineExceeded(
                f"rank {self.rank} waited {self.timeout_s:.0f} s for rank {peer}, which did not come. "
                "It may be in other code, or make fewer steps than its peers."
            )
        return PeerLost(
            f"rank {peer} is gone: its connection to rank {self.rank} closed while rank {self.rank} waited for it. "
            "Its own output says why; the job has to be started again."
        )

    # Epochs and failures

    def begin(self, epoch: int, header: int) -> None:
        """Enter an epoch. Each rank sends its `header` to the next one, in front of the epoch's first message.

        Equality round the ring is equality of all; whoever finds a difference announces it. On CUDA the host would
        have to wait for the value, so there it is not compared.
        """
        self.epoch = epoch
        if self._connections is None:
            self._connections = self._connect()
        if self.device.type != "cuda" and self.world_size > 1:
            self._header = torch.tensor([epoch, header])

    def _compare_headers(self, mine: torch.Tensor) -> None:
        theirs = torch.empty_like(mine)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self._exchange([(after, mine)], [(before, theirs)])
        if not torch.equal(mine, theirs):
            raise Mismatch(header_mismatch(self.rank, int(mine[1]), before, int(theirs[1])))

    def fail(self, message: str) -> None:
        """Tell everybody that this rank failed in its present epoch, and why."""
        self.group.announce(message, self.epoch)

    def disconnect(self) -> None:
        """Close our connections, once nothing here waits on them: that ends our peers' waits. `begin` reconnects."""
        self._connections = None

    def poll(self) -> None:
        for epoch in (self.epoch, self.epoch - 1):  # a peer may have failed at the very end of the last one
            message = self.group.announced(epoch)
            if message is not None:
                raise PeerFailed(message)

    def close(self) -> None:
        self._connections = None


class _Gloo:
    """A gloo context of our own on the group's store.

    Made directly rather than by new_group, whose names of groups with local synchronisation depend on how many groups
    a rank has made, and are used again after a group was destroyed.
    """

    def __init__(self, group: Group, prefix: str) -> None:
        timeout = datetime.timedelta(seconds=group.timeout_s)
        self._gloo: Any = dist.ProcessGroupGloo(group.store(prefix), group.rank, group.world_size, timeout)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[tuple[int, _Works]]:
        works = [(peer, self._gloo.recv([flat], peer, tag)) for peer, flat in receives]
        return works + [(peer, self._gloo.send([flat], peer, tag)) for peer, flat in sends]


class _Nccl:
    """A step's messages as one NCCL group on the current stream. Unverified: never run on a GPU yet."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._ranks = group.ranks
        self._group = dist.new_group(
            group.ranks,
            timeout=datetime.timedelta(seconds=group.timeout_s),
            backend="nccl",
            use_local_synchronization=True,
            device_id=device,
        )

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list[tuple[int, _Works]]:
        operations = [dist.P2POp(dist.irecv, flat, self._ranks[peer], self._group) for peer, flat in receives]
        operations += [dist.P2POp(dist.isend, flat, self._ranks[peer], self._group) for peer, flat in sends]
        peer = (receives or sends)[0][0]
        return [(peer, work) for work in dist.batch_isend_irecv(operations)]

    def __del__(self) -> None:
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # Already gone with the default group.
                dist.destroy_process_group(self._group)

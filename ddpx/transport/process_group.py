"""Messages over torch.distributed: gloo between CPUs, NCCL between GPUs.

Our messages travel on connections of our own, so they never interleave with the user's collectives. A wait inside gloo
ends when the message came, when a connection closes or at the deadline. So a rank that fails first writes its words on
the board and then closes its connections, and whoever loses one reads the board before blaming anybody.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddpx.errors import DeadlineExceeded, Error, Mismatch, PeerFailed, PeerLost
from ddpx.group import Group
from ddpx.transport import Ending, Landings, Message, Posted, header_mismatch

NO_TAG = 0x7FFFFFFE  # of a message that nobody sends
AT_ONCE = datetime.timedelta(milliseconds=1)
BOARD_S = 0.1  # how long to look for a failing rank's words after a connection closed; they are written before it


_Post = tuple[int, Callable[[], Ending], int, int]  # (peer, what posts a message with it, bytes sent, received)


class ProcessGroup:
    """The message transport. Constructing it is a collective; so is the first `begin` after a failure (on CPU)."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.device = device
        self.pipelined = device.type != "cuda"
        self.timeout_s = group.timeout_s
        self.epoch = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_peer = self.rank
        self.tag = 0  # messages of different tags don't meet (over gloo), so that calls of different sizes can't either
        self.landings = Landings()
        self.scratch: torch.Tensor | None = None
        self._failed_epoch = -2  # the last one in which this rank failed
        self._heard_of: int | None = None  # the epoch of the failure that `poll` last told of
        self._name = "messages"  # of the connections on the board
        self._header: torch.Tensor | None = None
        self._refused: Error | None = None  # why no message passes in this epoch
        self._connections: _Gloo | _Nccl | None = None
        self._connect()
        if self._refused is not None:
            raise self._refused

    def _connect(self) -> None:
        """Make connections with all peers, or keep the reason why not for who needs them."""
        try:
            message = self.group.announced()
            if message is not None:  # for good: nobody would be there
                raise PeerFailed(message)
            # Making connections can't be interrupted, so it begins when everybody is there. Until then deaths are seen.
            self.group.gather("connecting", None)
            is_cuda = self.device.type == "cuda"
            self._connections = _Nccl(self.group, self.device) if is_cuda else _Gloo(self.group, self._name)
            # Nobody may close a connection, by failing again, before everybody has all of them: gloo would wait for it.
            self.group.gather("connected", None)
        except Error as error:
            self._refused = error
        except RuntimeError as error:  # a peer that failed meanwhile, for example
            late = f"rank {self.rank} waited {self.timeout_s:.0f} s for its peers to connect; not all of them came."
            gone = f"a peer of rank {self.rank} is gone: it closed its connection while they were being made."
            self._refused = self._explain(str(error), late, gone)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, flat: torch.Tensor) -> None:
        """Nothing to forget: the memory is an ordinary tensor's."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post messages and wait for all of them."""
        self.finish(self.start(sends, receives))

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Posted]:
        if self._header is not None:
            header, self._header = self._header, None
            self._compare_headers(header)
        if not sends and not receives:
            return []
        connections = self._open()
        posted = []
        peer = (receives or sends)[0][0]
        try:
            for peer, post, sent, received in connections.posts(sends, receives, self.tag):
                posted.append(Posted(peer, post(), sent, received))
        except RuntimeError as error:
            self._refuse(error, peer)
        return posted

    def finish(self, messages: Iterable[Posted]) -> None:
        connections = self._connections
        longest_s, peer = 0.0, self.rank
        try:
            for message in messages:
                peer = message.peer
                before = time.perf_counter()
                message.ending.wait()
                waited_s = time.perf_counter() - before
                if waited_s > longest_s:
                    longest_s, self.last_peer = waited_s, peer
                self.bytes_sent += message.sent
                self.bytes_received += message.received
        except RuntimeError as error:
            self._refuse(error, peer)
        if connections is not self._connections:
            raise self._closed()

    def _open(self) -> "_Gloo | _Nccl":
        if self._refused is not None:
            raise self._refused
        if self._connections is None:
            raise self._closed()
        return self._connections

    def _closed(self) -> PeerFailed:
        return PeerFailed(f"rank {self.rank} has closed its connections after a failure")

    def _refuse(self, error: RuntimeError, peer: int) -> NoReturn:
        late = (
            f"rank {self.rank} waited {self.timeout_s:.0f} s for rank {peer}, which did not come. "
            "It may be in other code, or make fewer steps than its peers."
        )
        gone = (
            f"rank {peer} is gone: its connection to rank {self.rank} closed while rank {self.rank} waited for it. "
            "Its own output says why; the job has to be started again."
        )
        self._refused = self._explain(str(error), late, gone)
        raise self._refused from error

    def _explain(self, text: str, late: str, gone: str) -> Error:
        """What really happened when a message did not pass: an announced failure, a deadline, or a lost rank."""
        until = time.monotonic() + BOARD_S
        while True:
            try:
                self.poll()
            except PeerFailed as failure:
                return failure
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return DeadlineExceeded(late) if "imed out" in text or "imeout" in text else PeerLost(gone)

    # Epochs and failures

    def begin(self, epoch: int, header: int | None) -> None:
        """Enter an epoch. Each rank sends its `header` to the next one, in front of the epoch's first message.

        Equality round the ring is equality of all; whoever finds a difference announces it. On CUDA the host would
        have to wait for the value, so there it is not compared.
        """
        self.epoch, self._heard_of, self._refused = epoch, None, None
        if self._connections is None:
            self._connect()
        self._header = None
        if header is not None and self.device.type != "cuda" and self.world_size > 1:
            self._header = torch.tensor([epoch, header])

    def _compare_headers(self, mine: torch.Tensor) -> None:
        theirs = torch.empty_like(mine)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self.exchange([(after, mine)], [(before, theirs)])
        if not torch.equal(mine, theirs):
            message = header_mismatch(self.group, int(mine[1]), before, int(theirs[1]))
            if mine[0] != theirs[0]:  # they will never meet again
                self.group.announce(message)
            raise Mismatch(message)

    def fail(self, message: str) -> None:
        """Tell everybody that this rank failed in its present epoch, and why."""
        broken = self.epoch if self._heard_of is None else self._heard_of
        self._heard_of = None
        self._name = f"messages after {broken}"  # the same for those who failed there and those who hear of it later
        self._failed_epoch = self.epoch
        self.group.announce(message, self.epoch)

    def disconnect(self) -> None:
        """Close our connections, which ends our own waits and our peers'. `begin` reconnects."""
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def poll(self) -> None:
        """Raise PeerFailed if a rank failed in the present epoch, or for good."""
        epochs = [self.epoch, -1]
        if self._failed_epoch != self.epoch - 1:  # a peer may have failed at the very end of it, when we were through
            epochs.append(self.epoch - 1)
        for epoch in epochs:
            try:
                message = self.group.announced(epoch)
            except RuntimeError:  # The store is gone, and most likely rank 0 with it: its connections speak.
                return
            if message is not None:
                self._heard_of = epoch
                raise PeerFailed(message)

    def close(self) -> None:
        self.disconnect()
        self.group.close()


class _Gloo:
    """A gloo context of our own on the group's store.

    Made directly rather than by new_group, whose names of groups with local synchronisation depend on how many groups
    a rank has made, and are used again after a group was destroyed.
    """

    def __init__(self, group: Group, prefix: str) -> None:
        timeout = datetime.timedelta(seconds=group.timeout_s)
        self._peers = [peer for peer in range(group.world_size) if peer != group.rank]
        self._gloo: Any = dist.ProcessGroupGloo(group.store(prefix), group.rank, group.world_size, timeout)

    def posts(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Iterator[_Post]:
        for peer, flat in receives:
            yield peer, partial(self._gloo.recv, [flat], peer, tag), 0, flat.nbytes
        for peer, flat in sends:
            yield peer, partial(self._gloo.send, [flat], peer, tag), flat.nbytes, 0

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
        self._ranks = group.ranks
        self._group = dist.new_group(
            group.ranks,
            timeout=datetime.timedelta(seconds=group.timeout_s),
            backend="nccl",
            use_local_synchronization=True,
            device_id=device,
        )

    def posts(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Iterator[_Post]:
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

"""Messages on connections of our own, which fail all together and are made anew for the next epoch.

They are our own so that our messages never interleave with the user's collectives. A wait for a message ends when it
came, when a connection closes or at the deadline. So a rank that fails first writes its words on the board and then
closes its connections, and whoever loses one reads the board before blaming anybody.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch

from ddpx.errors import DeadlineExceeded, Error, PeerFailed, PeerLost
from ddpx.group import Group
from ddpx.transport import Ending, Landings, Message, Posted

TELL_S = 0.3  # a longer wait is told, so that peers who wait for this rank see whom it waits for
BOARD_S = 0.1  # how long to look for a failing rank's words after a connection closed; they are written before it

Post = tuple[int, Callable[[], Ending], int, int]  # (peer, what posts a message with it, bytes sent, received)


class Connections(Protocol):
    """One to each peer. What it posts ends well or in a RuntimeError, which says "timed out" at the deadline."""

    def posts(self, sends: Sequence[Message], receives: Sequence[Message]) -> Iterator[Post]: ...

    def close(self) -> None:
        """End every wait, here and at our peers. From any thread."""


class Connected(ABC):
    """A message transport, but for the connections. Constructing it is a collective; so is `begin` after a failure."""

    segment_bytes: int
    segments: int

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.device = device
        self.pipelined = device.type == "cpu"
        self.timeout_s = group.timeout_s
        self.epoch = 0
        self._place = 0  # the epoch or call that messages belong to
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_peer = self.rank
        self.landings = Landings()
        self.scratch: torch.Tensor | None = None
        self._failed_epoch = -2  # the last one in which this rank failed
        self._heard_of: int | None = None  # the epoch of the failure that `poll` last told of
        self._name = "messages"  # of the connections on the board
        self._waits_for: int | None = None
        self._wait_seen: tuple[int, int, float] | None = None  # place, peer, since when
        self._wait_told: tuple[int, int] | None = None
        self._refused: Error | None = None  # why no message passes in this epoch
        self._connections: Any = None  # as `_make` made them
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
            offers = self.group.gather("connecting", self._offer())
            problem = None
            try:
                self._connections = self._make(self._name, offers)
            except OSError as error:
                problem = f"rank {self.rank} cannot connect to its peers: {error}"
            # Nobody may close a connection, by failing again, before everybody has all of them: gloo would wait for it.
            problems = [text for text in self.group.gather("connected", problem) if text]
            if problems:
                self.disconnect()
                raise Error(problems[0])
        except Error as error:
            self._refused = error
        except RuntimeError as error:  # a peer that failed meanwhile, for example
            late = f"rank {self.rank} waited {self.timeout_s:.0f} s for its peers to connect; not all of them came."
            gone = f"a peer of rank {self.rank} is gone: it closed its connection while they were being made."
            self._refused = self._explain(error, late, gone)

    def _offer(self) -> Any:
        """What peers need to know of this rank to connect to it; None where the store tells them."""
        return None

    @abstractmethod
    def _make(self, name: str, offers: list[Any]) -> Connections:
        """Connect, with what each rank offers. `name`: of these connections on the board. A collective."""

    @abstractmethod
    def _say(self, epoch: int, header: int | None) -> None:
        """Have messages from here on compare epoch and header."""

    def mark(self, number: int, header: int) -> None:
        """Messages from here on belong to a numbered call, and do not meet those of another one."""
        self._place = number

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, flat: torch.Tensor) -> None:  # noqa: B027 - no subclass has to do anything
        """Nothing to forget: the memory is an ordinary tensor's."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post messages and wait for all of them."""
        self.finish(self.start(sends, receives))

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Posted]:
        if not sends and not receives:
            return []
        connections = self.open_connections()
        posted = []
        peer = (receives or sends)[0][0]
        try:
            for peer, post, sent, received in connections.posts(sends, receives):
                posted.append(Posted(peer, post(), sent, received))
        except Error:
            raise
        except RuntimeError as error:
            self.refuse(error, peer)
        return posted

    def finish(self, messages: Iterable[Posted]) -> None:
        connections = self._connections
        longest_s, peer = 0.0, self.rank
        try:
            for message in messages:
                peer = message.peer
                before = time.perf_counter()
                self._waits_for = peer
                message.ending.wait()
                self._waits_for = None
                waited_s = time.perf_counter() - before
                if waited_s > longest_s:
                    longest_s, self.last_peer = waited_s, peer
                self.bytes_sent += message.sent
                self.bytes_received += message.received
        except Error:
            raise
        except RuntimeError as error:
            self.check_open(connections)  # what a wait of an earlier epoch ends in is no affair of this one
            self.refuse(error, peer)
        self.check_open(connections)

    def check_open(self, connections: Any) -> None:
        """Raise unless `connections`, which messages have just passed, are still the present ones."""
        if connections is not self._connections:
            raise self._closed()

    def open_connections(self) -> Any:
        """The present ones, or what keeps messages from passing."""
        if self._refused is not None:
            raise self._refused
        if self._connections is None:
            raise self._closed()
        return self._connections

    def _closed(self) -> PeerFailed:
        return PeerFailed(f"rank {self.rank} has closed its connections after a failure")

    def refuse(self, error: RuntimeError, peer: int) -> NoReturn:
        """Let no message pass any more in this epoch, and raise what has really happened."""
        missing = self._last_of_chain(peer) if _is_late(error) else peer
        through = f", for which rank {peer} waits, too" if missing != peer else ""
        late = (
            f"rank {self.rank} waited {self.timeout_s:.0f} s for rank {missing}{through}, which did not come. "
            "It may be in other code, or make fewer steps than its peers."
        )
        gone = (
            f"rank {peer} is gone: its connection to rank {self.rank} closed while rank {self.rank} waited for it. "
            "Its own output says why; the job has to be started again."
        )
        self._refused = self._explain(error, late, gone)
        raise self._refused from error

    def _explain(self, error: RuntimeError, late: str, gone: str) -> Error:
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
        return DeadlineExceeded(late) if _is_late(error) else PeerLost(gone)

    # Who waits for whom

    def waits_for(self) -> int | None:
        """The peer that a message is awaited from, or taken by, now. From any thread."""
        return self._waits_for

    def _tell_of_long_wait(self) -> None:
        peer, now_s = self.waits_for(), time.monotonic()
        if peer is None or self._wait_seen is None or self._wait_seen[:2] != (self._place, peer):
            self._wait_seen = None if peer is None else (self._place, peer, now_s)
        elif now_s - self._wait_seen[2] > TELL_S and self._wait_told != (self._place, peer):
            self._wait_told = self._place, peer
            self.group.leave("waits", self._wait_told)

    def _last_of_chain(self, peer: int) -> int:
        """Who waits for nobody, as far as it is told, going from rank to rank that each waits for."""
        self.group.leave("waits", (self._place, peer))
        passed = {self.rank}
        while peer not in passed:
            passed.add(peer)
            note = self.group.left("waits", peer)
            if note is None or note[0] != self._place:
                break
            peer = note[1]
        return peer

    # Epochs and failures

    def begin(self, epoch: int, header: int | None) -> None:
        """Enter an epoch, in which messages tell whose `header` differs; None: to say no more than that we failed."""
        self.epoch = self._place = epoch
        self._heard_of, self._refused = None, None
        if self._connections is None:
            self._waits_for = None
            self._connect()
        self._say(epoch, header)

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

    def is_stranded(self) -> bool:
        """Whether the thread at work is in a wait for a message that closing the connections has not ended.

        gloo forgets a wait now and then when both ends of a connection close at once: it lasts until its time limit.
        The thread may be left there: it touches nothing more, since what it finds are not the connections it knows.
        """
        return self._connections is None and self._waits_for is not None

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
        self._tell_of_long_wait()

    def close(self) -> None:
        self.disconnect()
        self.group.close()


def _is_late(error: RuntimeError) -> bool:
    """Whether a wait ended at its deadline, going by the words of whoever waited."""
    words = str(error).lower()
    return "timed out" in words or "timeout" in words

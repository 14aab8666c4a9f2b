"""A plan on a message transport: chunks cut in segments, and each message posted as early as it may be.

A large chunk in one piece is slow: while it travels nothing is added, and while it is added nothing travels. So chunks
travel in segments, and a rank goes through (step, segment) after (step, segment), its *rounds*: what came is added and
sent on at once, while later segments travel. Receives are posted some rounds ahead, so that what a peer sends has a
place to go and leaves without another round trip.

Note: why nobody waits for ever. All ranks go through (step, segment) in the same order. What a rank sends at step s
leaves when it enters step s at the latest, and a rank waits for the end of a send only from the round on in which its
peer must have posted the receive. So of all waiting ranks, the one that has come least far can go on.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ddpx.operations import Combine, Copy, action, compute
from ddpx.program import MessageStep, message_program
from ddpx.schedule import Move, Schedule
from ddpx.transport import Message, MessageTransport, Posted

AHEAD = 3  # rounds
ASIDE_BYTES = 64 << 10  # so small a message may as well land aside and be copied: nothing delays its receive then

_Cell = tuple[int, int]  # (chunk, segment)


@dataclass(slots=True)
class Round:
    """What a rank does about one segment of one step. Messages are numbered by plan."""

    settled: list[int] = field(default_factory=list)  # sends to end before the receives are posted
    receives: list[Message] = field(default_factory=list)  # to post
    sends: list[Message] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)  # the numbers of those receives, then of those sends
    awaited: list[int] = field(default_factory=list)  # receives and sends to end before the actions
    hold_s: float = 0.0
    actions: list[Copy | Combine] = field(default_factory=list)


def bind_rounds(
    schedule: Schedule,
    transport: MessageTransport,
    flat: torch.Tensor,
    operation: str,
    hold_s: dict[int, float] | None,  # by step: how long an emulated link holds this rank back; None: there is none
    bounds: Sequence[tuple[int, int]],  # [begin, end) of each chunk in `flat`
) -> list[Round]:
    """What this rank does, in order."""
    whole = hold_s is not None or not transport.pipelined
    return _Binding(schedule, transport, flat, operation, hold_s or {}, bounds, whole).rounds


class MessagePlan:
    """Runs its rounds one after the other, call by call."""

    def __init__(self, transport: MessageTransport, rounds: list[Round]) -> None:
        self._transport = transport
        self.peer_wait_s = 0.0
        self.last_peer = transport.rank
        self.rounds = rounds
        self._calls = [[action(operation) for operation in step.actions] for step in rounds]

    def run(self) -> None:
        transport = self._transport
        under_way: dict[int, Posted] = {}
        self.peer_wait_s, longest_s, self.last_peer = 0.0, 0.0, transport.rank
        for step, calls in zip(self.rounds, self._calls):
            before = time.perf_counter()
            if step.settled:
                transport.finish([under_way.pop(number) for number in step.settled])
            if step.posted:
                under_way.update(zip(step.posted, transport.start(step.sends, step.receives), strict=True))
            transport.finish([under_way.pop(number) for number in step.awaited])
            waited_s = time.perf_counter() - before
            if waited_s > longest_s:
                longest_s, self.last_peer = waited_s, transport.last_peer
            if step.hold_s:
                time.sleep(max(0.0, step.hold_s - waited_s))
            self.peer_wait_s += time.perf_counter() - before
            for call in calls:
                call()


@dataclass(frozen=True, slots=True)
class _Segment:
    cells: tuple[_Cell, ...]
    begin: int  # in the buffer
    end: int


class _Binding:
    """Works out the rounds, in the order they run.

    `whole`: one message a chunk, and a step's messages posted and ended together. Else a message is posted in the first
    round in which nothing stands against it, and messages of one pair of ranks in their order.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: MessageTransport,
        flat: torch.Tensor,
        operation: str,
        hold_s: dict[int, float],
        bounds: Sequence[tuple[int, int]],
        whole: bool,
    ) -> None:
        self._transport, self._flat, self._operation, self._bounds = transport, flat, operation, bounds
        self._whole = whole
        self._ahead = 0 if whole else AHEAD
        # A move of several chunks is one message, whose segments would not be those of its chunks.
        self._cut = not whole and all(move.hi == move.lo + 1 for move in schedule.moves)
        self.rounds: list[Round] = []
        self._messages: list[tuple[int, Message, bool]] = []  # (round it is posted in, message, whether it is sent)
        self._ends: dict[int, tuple[int, bool]] = {}  # by number: round, whether after that round's posting
        self._written: dict[_Cell, int] = {}  # the last round that writes it
        self._sent: dict[_Cell, list[tuple[int, int]]] = defaultdict(list)  # (number, round of its step) of its sends
        self._last_post: dict[tuple[int, bool], int] = defaultdict(int)  # (peer, whether sent)
        self._slot, self._slots = 0, 1
        self._landed: dict[int, int] = {}  # slot of the landings -> the last round that reads it
        for step in message_program(schedule, transport.rank):
            self._bind(step, hold_s)
        self._close()

    def _bind(self, step: MessageStep, hold_s: dict[int, float]) -> None:
        first = len(self.rounds)
        moves = [*step.moves, *(move for _, move in step.sends)]
        segments = {(move.lo, move.hi): self._segments(move) for move in moves}
        width = max(map(len, segments.values()))
        self.rounds += [Round() for _ in range(width)]
        self.rounds[first].hold_s = hold_s.get(moves[0].step, 0.0)
        before = {cell: tuple(sends) for cell, sends in self._sent.items()}
        for here in range(first, first + width):
            for peer, move in step.sends:
                for segment in segments[move.lo, move.hi][here - first : here - first + 1]:
                    self._send(peer, segment, here, first)
        aside = [not in_place or self._aside(segments[move.lo, move.hi]) for _, move, in_place in step.receives]
        self._slots = max(self._slots, sum(aside) * (self._ahead + 1))
        arrived: dict[tuple[int, int, int], torch.Tensor] = {}  # (source, lo, round) -> where it lands
        for here in range(first, first + width):
            for (peer, move, _), lands_aside in zip(step.receives, aside, strict=True):
                for segment in segments[move.lo, move.hi][here - first : here - first + 1]:
                    arrived[peer, move.lo, here] = self._receive(peer, segment, here, lands_aside, before)
        for move in step.moves:
            for here, segment in enumerate(segments[move.lo, move.hi], first):
                self._act(move, segment, here, arrived)

    def _segments(self, move: Move) -> list[_Segment]:
        begin, end = self._bounds[move.lo][0], self._bounds[move.hi - 1][1]
        nbytes = (end - begin) * self._flat.element_size()  # alone decides: sender and receiver both know it
        most, least_bytes = self._transport.segments, self._transport.segment_bytes
        k = max(1, min(most, nbytes // least_bytes)) if self._cut else 1
        cuts = [begin + (end - begin) * g // k for g in range(k + 1)]
        chunks = range(move.lo, move.hi)
        return [_Segment(tuple((chunk, g) for chunk in chunks), cuts[g], cuts[g + 1]) for g in range(k)]

    def _aside(self, segments: Sequence[_Segment]) -> bool:
        nbytes = max(segment.end - segment.begin for segment in segments) * self._flat.element_size()
        return not self._whole and nbytes <= ASIDE_BYTES

    def _send(self, peer: int, segment: _Segment, here: int, first: int) -> None:
        if segment.begin == segment.end:
            return
        ready = first if self._whole else max(self._written.get(cell, -1) + 1 for cell in segment.cells)
        number = self._post(peer, self._flat[segment.begin : segment.end], ready, sent=True)
        for cell in segment.cells:
            self._sent[cell].append((number, here))
        if self._whole:
            self._end(number, here, after_posting=True)

    def _receive(
        self, peer: int, segment: _Segment, here: int, aside: bool, sent: dict[_Cell, tuple[tuple[int, int], ...]]
    ) -> torch.Tensor:
        """Where it lands. In place, all that was done there at earlier steps, `sent` among it, has to have ended."""
        landing = self._flat[segment.begin : segment.end]
        reading: list[tuple[int, int]] = []
        if aside:
            self._slot = (self._slot + 1) % self._slots
            landing = self._transport.landings.take(self._slot, landing)
            ready = self._landed.get(self._slot, -1) + 1
            self._landed[self._slot] = here
        else:
            reading = [send for cell in segment.cells for send in sent.get(cell, ())]
            ready = max(self._written.get(cell, -1) + 1 for cell in segment.cells)
            ready = max([ready, *(place + 1 for _, place in reading)])
        if landing.numel():
            number = self._post(peer, landing, max(ready, here - self._ahead), sent=False)
            self._end(number, here, after_posting=True)
            for send, _ in reading:
                self._end(send, self._messages[number][0], after_posting=False)
        return landing

    def _act(self, move: Move, segment: _Segment, here: int, arrived: dict[tuple[int, int, int], torch.Tensor]) -> None:
        place = self._flat[segment.begin : segment.end]
        mine = self._transport.rank
        sources = [place if source == mine else arrived[source, move.lo, here] for source in move.srcs]
        landed = len(sources) == 1 and sources[0].data_ptr() == place.data_ptr()
        if place.numel() and not landed:
            for cell in segment.cells:
                for number, _ in self._sent.pop(cell, ()):
                    self._end(number, here, after_posting=True)
            self.rounds[here].actions.append(compute(place, sources, self._operation))
        self._written.update(dict.fromkeys(segment.cells, here))

    def _post(self, peer: int, flat: torch.Tensor, ready: int, sent: bool) -> int:
        """Its number. Between two ranks, messages are posted in their order."""
        at = self._last_post[peer, sent] = max(ready, self._last_post[peer, sent])
        self._messages.append((at, (peer, flat), sent))
        return len(self._messages) - 1

    def _end(self, number: int, at: int, after_posting: bool) -> None:
        self._ends[number] = min((at, after_posting), self._ends.get(number, (at, after_posting)))

    def _close(self) -> None:
        """Put all messages into their rounds; what nobody needs to end earlier ends in a last one."""
        self.rounds.append(Round())
        order = sorted(range(len(self._messages)), key=lambda number: self._messages[number][2])  # receives first
        for number in order:
            at, message, sent = self._messages[number]
            (self.rounds[at].sends if sent else self.rounds[at].receives).append(message)
            self.rounds[at].posted.append(number)
            at, after_posting = self._ends.get(number, (len(self.rounds) - 1, True))
            (self.rounds[at].awaited if after_posting else self.rounds[at].settled).append(number)

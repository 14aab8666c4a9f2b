"""The compiled interpreter of a message plan over sockets: posts, waits and sums in one call without the GIL."""

import ctypes
from collections import Counter
from collections.abc import Sequence

from ddpx.compiled import LIBRARY, Encoded, Kind
from ddpx.messages import Round
from ddpx.native import Encoder, Waiting, knows
from ddpx.operations import Combine
from ddpx.transport import Message, MessageTransport
from ddpx.transport.sockets import Sockets


def compile_rounds(transport: MessageTransport, rounds: Sequence[Round]) -> "NativeMessagePlan | None":
    """A plan in one call, or None where the transport is another or the library does not know an operation."""
    if not isinstance(transport, Sockets) or any(step.hold_s for step in rounds):
        return None
    sums = [operation for step in rounds for operation in step.actions if isinstance(operation, Combine)]
    return NativeMessagePlan(transport, rounds) if all(knows(s.operation, s.out.dtype) for s in sums) else None


class NativeMessagePlan(Waiting):
    """The rounds as an array the library reads; memory they name is kept alive here."""

    def __init__(self, transport: Sockets, rounds: Sequence[Round]) -> None:
        assert LIBRARY is not None
        super().__init__()
        self._run = LIBRARY.ddpx_mesh_run
        self._transport = transport
        self._encoder = Encoder()
        self._keep = rounds
        self._posted: Counter[tuple[int, bool]] = Counter()  # messages of (peer, whether sent) in this plan
        self._waits: dict[int, Encoded] = {}  # by number of a message
        self._sent_bytes = self._received_bytes = 0
        operations = [operation for step in rounds for operation in self._encode(step)]
        self._array = (Encoded * len(operations))(*operations)
        self._count = len(operations)

    def _encode(self, step: Round) -> list[Encoded]:
        settled = [self._waits.pop(number) for number in step.settled]
        messages = [(message, False) for message in step.receives] + [(message, True) for message in step.sends]
        posts = []
        for number, (message, is_sent) in zip(step.posted, messages, strict=True):
            post, self._waits[number] = self._post(message, is_sent)
            posts.append(post)
        awaited = [self._waits.pop(number) for number in step.awaited]
        return [*settled, *posts, *awaited, *map(self._encoder.compute, step.actions)]

    def _post(self, message: Message, is_sent: bool) -> tuple[Encoded, Encoded]:
        """What posts it, and what waits for it: by its number among those of this plan."""
        peer, flat = message
        self._posted[peer, is_sent] += 1
        if is_sent:
            self._sent_bytes += flat.nbytes
        else:
            self._received_bytes += flat.nbytes
        post, wait = (Kind.SEND, Kind.SENT) if is_sent else (Kind.RECEIVE, Kind.RECEIVED)
        return (
            Encoded(kind=post, count=flat.nbytes, out=flat.data_ptr(), peer=peer),
            Encoded(kind=wait, count=self._posted[peer, is_sent], peer=peer),
        )

    def run(self) -> None:
        transport = self._transport
        outcome = self._nothing_yet(transport.rank)
        mesh = transport.open_connections()
        transport.check(mesh, self._run(mesh.handle, self._array, self._count, mesh.timeout_ns, ctypes.byref(outcome)))
        transport.bytes_sent += self._sent_bytes
        transport.bytes_received += self._received_bytes

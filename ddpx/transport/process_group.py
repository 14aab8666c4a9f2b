"""Messages over torch.distributed: gloo between CPUs, NCCL between GPUs.

Our messages travel on a process group of our own, so they never interleave with the user's collectives. A wait inside
gloo can't be interrupted; it ends when the peer's connection closes or at the deadline. So the thread that waits for the
communication thread also reads the board, and raises there what a peer announced.
"""

import contextlib
import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpx.errors import DeadlineExceeded, Mismatch, PeerFailed, PeerLost
from ddpx.group import Group
from ddpx.transport import Landings, header_mismatch


class ProcessGroup:
    """The message transport. Constructing it is a collective: it makes a new process group on the same ranks."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.device = device
        self.timeout_s = group.timeout_s
        self.epoch = 0
        self.bytes_sent = 0
        self.last_peer = self.rank
        self.landings = Landings()
        self._header: torch.Tensor | None = None
        self._messages: dist.ProcessGroup | None = self._connect()

    def _connect(self) -> dist.ProcessGroup:
        return dist.new_group(
            self.group.ranks,
            timeout=datetime.timedelta(seconds=self.timeout_s),
            backend="nccl" if self.device.type == "cuda" else "gloo",
            use_local_synchronization=True,
            device_id=self.device if self.device.type == "cuda" else None,
        )

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, flat: torch.Tensor) -> None:
        """Nothing to forget: the memory is an ordinary tensor's."""

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        if self._messages is None:
            raise PeerFailed(f"rank {self.rank} has closed its connections after a failure")
        if self._header is not None:
            header, self._header = self._header, None
            self._compare_headers(header)
        self._exchange(sends, receives)

    def _exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        ranks = self.group.ranks
        operations = [dist.P2POp(dist.irecv, flat, ranks[peer], self._messages) for peer, flat in receives]
        operations += [dist.P2POp(dist.isend, flat, ranks[peer], self._messages) for peer, flat in sends]
        if not operations:
            return
        peers = [peer for peer, _ in [*receives, *sends]]
        try:
            works = dist.batch_isend_irecv(operations)
            for index, work in enumerate(works):
                self.last_peer = peers[index]
                work.wait()
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text:
                raise DeadlineExceeded(
                    f"rank {self.rank} waited {self.timeout_s:.0f} s for rank {self.last_peer}, which did not come. "
                    "It may be in other code, or make fewer steps than its peers."
                ) from error
            raise PeerLost(
                f"rank {self.last_peer} is gone: its connection to rank {self.rank} closed ({text.splitlines()[0]})."
            ) from error
        self.bytes_sent += sum(flat.nbytes for _, flat in sends)

    # Epochs and failures

    def begin(self, epoch: int, header: int) -> None:
        """Enter an epoch. Each rank sends its `header` to the next one, in front of the epoch's first message.

        Equality round the ring is equality of all; whoever finds a difference announces it. On CUDA the host would
        have to wait for the value, so there it is not compared.
        """
        self.epoch = epoch
        if self._messages is None:
            self._messages = self._connect()
        if self.device.type != "cuda" and self.world_size > 1:
            self._header = torch.tensor([epoch, header])

    def _compare_headers(self, mine: torch.Tensor) -> None:
        theirs = torch.empty_like(mine)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self._exchange([(after, mine)], [(before, theirs)])
        if not torch.equal(mine, theirs):
            raise Mismatch(header_mismatch(self.rank, int(mine[1]), before, int(theirs[1])))

    def fail(self, message: str) -> None:
        """Tell everybody, then close our connections: that ends the waits of peers inside gloo. `begin` reconnects."""
        self.group.announce(message, self.epoch)
        self.close()

    def poll(self) -> None:
        for epoch in (self.epoch, self.epoch - 1):  # a peer may have failed at the very end of the last one
            message = self.group.announced(epoch)
            if message is not None:
                raise PeerFailed(message)

    def close(self) -> None:
        messages, self._messages = self._messages, None
        if messages is not None and dist.is_initialized():
            with contextlib.suppress(Exception):  # Already gone with the default group, or its peers are.
                dist.destroy_process_group(messages)

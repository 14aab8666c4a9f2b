"""How bytes get from rank to rank: two contracts, and a wrapper that makes any of them slow.

- `MessageTransport`: sends and receives are posted, and waited for later, so that several are under way at once.
- `MappedTransport`: every rank reads its peers' memory in place. A rank says how far it has come by one growing number,
  its *clock*; a peer waits for a clock to reach a value. A rank writes its own memory, and where `delivers` is true its
  sums into that of its peers, each of whom can *shut* its own against that.

Both own memory (`empty`), both are used by one thread at a time, and every wait ends: when the peer came, when it died
or said that it failed, or at the deadline.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ddpx.group import Group


@dataclass(frozen=True, slots=True)
class Link:
    """An emulated network: a message of b bytes takes `alpha_s + b * beta_s_per_byte`, without using the processor."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: int) -> float:
        return self.alpha_s + nbytes * self.beta_s_per_byte

    def __str__(self) -> str:
        alpha = f"{self.alpha_s * 1e6:g}us" if self.alpha_s < 1e-3 else f"{self.alpha_s * 1e3:g}ms"
        return f"{alpha},{1e-9 / self.beta_s_per_byte:g}GB/s" if self.beta_s_per_byte else f"{alpha},infGB/s"

    @classmethod
    def parse(cls, text: str) -> "Link":
        """A link from 'ALPHA,BANDWIDTH', for example '200us,1GB/s' or '1ms,10Gbit/s'. ValueError says what is wrong."""
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(ns|us|ms|s)\s*,\s*(\d+\.?\d*|\.\d+)\s*([kMG])(B|bit)/s\s*", text)
        if not found:
            raise ValueError(f"a link is LATENCY,BANDWIDTH such as 200us,1GB/s or 1ms,10Gbit/s, not '{text}'")
        alpha_s = float(found[1]) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
        bytes_per_s = float(found[3]) * {"k": 1e3, "M": 1e6, "G": 1e9}[found[4]] / {"B": 1, "bit": 8}[found[5]]
        if bytes_per_s <= 0:
            raise ValueError(f"a link needs a bandwidth above zero, not '{text}'")
        return cls(alpha_s, 1 / bytes_per_s)


class Landings:
    """Memory in which messages land before they are added. Plans run one at a time, so all of a transport share it."""

    def __init__(self) -> None:
        self._flats: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def take(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """Flat memory for the message at `position` within its step, sized as `like`."""
        key = (position, like.dtype)
        flat = self._flats.get(key)
        if flat is None or flat.numel() < like.numel():
            flat = self._flats[key] = torch.empty_like(like)
        return flat[: like.numel()]


Message = tuple[int, torch.Tensor]  # (peer, flat tensor)


class Ending(Protocol):
    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Posted:
    """A message on its way, until `finish`."""

    peer: int
    ending: Ending
    sent: int  # bytes
    received: int


class MessageTransport(Protocol):
    """Point-to-point messages; between two ranks they arrive in the order posted."""

    rank: int
    world_size: int
    landings: Landings
    scratch: torch.Tensor | None  # fp32, from `empty`; see ddpx.execute
    bytes_sent: int
    bytes_received: int
    last_peer: int  # whom the longest wait of the last `finish` was for
    pipelined: bool  # whether messages can be posted one by one; if not, those of a step together
    segment_bytes: int  # a chunk is cut into pieces no smaller than this
    segments: int  # and into no more than these

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised flat tensor, (numel,), on `device`."""

    def start(
        self,
        sends: Sequence[Message],  # read until they are finished
        receives: Sequence[Message],  # written
    ) -> list[Posted]:
        """Post messages: the receives, then the sends."""

    def finish(self, messages: Iterable[Posted]) -> None:
        """Wait for their ends, in order (on CUDA: order the current stream after them). Each message once."""

    def close(self) -> None: ...


@runtime_checkable
class MappedTransport(Protocol):
    """Memory that peers read in place, and a clock for each rank that its peers wait on."""

    rank: int
    world_size: int
    clock: int
    scratch: torch.Tensor | None  # fp32, from `empty`; see ddpx.execute
    bytes_read: int  # from peers, or written here by them; counted by the plans as they run
    delivers: bool  # the same on every rank

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeroed (numel,) tensor that every peer can read. A collective: same numel and dtype on all ranks."""

    def peers(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """For a slice of a tensor from `empty`: each rank's same slice, in rank order, to read or deliver to."""

    def start(self) -> int:
        """The clock as a plan starts. Raises what ended an earlier one of this epoch: its clock would be misread."""

    def owe(self, peer: int, clock: int) -> None:
        """Put a wait at a plan's end off until `settle`."""

    def publish(self, clock: int) -> None:
        """Set this rank's clock, after all its earlier writes, and wake who waits for it."""

    def wait(self, peer: int, clock: int) -> None:
        """Return once the peer's clock has reached `clock`. Raises PeerLost, PeerFailed, DeadlineExceeded."""

    def close(self) -> None: ...


# A header is what all ranks must have in common as they enter an epoch. From its lowest bit: whether there has been a
# forward since the last synchronised backward (1 bit; not how many, since one that is dropped harms nobody), forwards
# whose backward was skipped (4 bits, from the 9th; see ddpx.skips), those with all parameters frozen (4), synchronised
# backwards that ended well (16), what the epoch is for (4), and a digest of the buffers that forwards share (24; 0: no
# buffers).
IN_FORWARD = 1 << 32
IN_BACKWARD = 2 << 32
IN_JOIN = 3 << 32
KINDS = 15 << 32
DIGEST_AT, DIGEST_BITS = 36, 24


def header_of(kind: int, backwards: int, is_fresh: bool, frozen: int = 0, digest: int = 0, skipped: int = 0) -> int:
    """The header of an epoch of that kind."""
    forwards = min(frozen, 0xF) << 12 | min(skipped, 0xF) << 8 | is_fresh
    return digest << DIGEST_AT | kind | (backwards & 0xFFFF) << 16 | forwards


def header_mismatch(group: Group, mine: int, peer: int, theirs: int) -> str:
    """What to tell when this rank and `peer` entered the same epoch with different headers."""
    rank, other = group.known_as(group.rank), group.known_as(peer)
    if mine >> DIGEST_AT != theirs >> DIGEST_AT:
        buffers = group.left("buffers", group.rank), group.left("buffers", peer)
        if buffers != (None, None):
            return buffers_mismatch(rank, buffers[0] or {}, other, buffers[1] or {})
    peer = other
    words = {
        IN_FORWARD: "is in a forward, sharing buffers",
        IN_BACKWARD: "is in a backward, reducing gradients",
        IN_JOIN: "tells inside join() what comes next",
    }
    kinds = [words.get(header & KINDS, "runs a collective of its own") for header in (mine, theirs)]
    if kinds[0] != kinds[1]:
        return (
            f"ranks are out of step: rank {rank} {kinds[0]}, while rank {peer} {kinds[1]}. "
            "Each rank has to run the same forwards and backwards in the same order. Run an extra forward with "
            "model.eval(), under torch.no_grad() or on model.module, and use model.join() for uneven inputs."
        )
    backwards = [header >> 16 & 0xFFFF for header in (mine, theirs)]
    if backwards[0] != backwards[1]:
        return (
            f"ranks are out of step: rank {rank} has ended {backwards[0]} synchronised backwards and rank {peer} "
            f"{backwards[1]}. One of them failed when the other was through, so their weights may differ by now: "
            "start again from a checkpoint."
        )
    frozen = [header >> 12 & 0xF for header in (mine, theirs)]
    if frozen[0] != frozen[1]:
        return (
            f"ranks are out of step: since the last synchronised backward, rank {rank} made {frozen[0]} training "
            f"forward(s) with all parameters frozen and rank {peer} made {frozen[1]}. Every rank has to freeze and "
            "unfreeze (requires_grad) in the same steps."
        )
    skipped = [header >> 8 & 0xF for header in (mine, theirs)]
    if skipped[0] != skipped[1]:
        return (
            f"ranks are out of step: since the last synchronised backward, rank {rank} skipped the backward of "
            f"{skipped[0]} training forward(s) and rank {peer} that of {skipped[1]}, so gradients of different steps "
            "would be averaged. To leave out a batch on one rank, run backward on its loss times 0; run an extra "
            "forward with model.eval(), under torch.no_grad() or on model.module, and use model.join() for uneven "
            "inputs."
        )
    fresh, again = (rank, peer) if mine & 1 else (peer, rank)
    return (
        f"ranks are out of step: rank {again} runs another backward through the forwards of its last one, and "
        f"rank {fresh} has begun its next step. Each rank has to run as many backwards for its forwards."
    )


def buffers_mismatch(rank: int, mine: dict[str, str], peer: int, theirs: dict[str, str]) -> str:
    """The first difference between two ranks' buffers, given as name and description."""
    names = {**mine, **theirs} if rank < peer else {**theirs, **mine}
    pairs = [(name, mine.get(name, "none"), theirs.get(name, "none")) for name in names]
    where = next((pair for pair in pairs if pair[1] != pair[2]), None)
    what = "they come in another order"
    if where is not None:
        what = f"{where[0]} is {where[1]} on rank {rank} and {where[2]} on rank {peer}"
    return (
        f"the module's buffers differ between rank {rank} and rank {peer}: {what}. Training forwards share rank 0's "
        "buffers, so ranks have to register, size and type them alike. To leave one out, name it to "
        "_set_params_and_buffers_to_ignore_for_model before wrapping; or pass forward_sync_buffers=False."
    )

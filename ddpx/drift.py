"""Do all ranks still hold the same parameters? A rolling checksum, a few megabytes every so many steps.

Parameters are cut into pieces, pieces gathered into windows. A check adds up the bits of one window's pieces as
integers (exact, so equal bits give equal sums in any order), lets every rank see all sums, and names the first piece
that differs. It starts with a backward, on the communication stream, and is read when that backward has ended.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpx.arena import is_dense
from ddpx.communicator import Communicator
from ddpx.errors import ReplicasDrifted
from ddpx.group import ranks_text
from ddpx.stream import Pending

EVERY = 10  # rounds between two checks
WINDOW_BYTES = 4 << 20
WINDOW_PIECES = 64
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [begin, end) of a parameter's memory."""

    name: str
    param: Tensor
    begin: int
    end: int


class ReplicaCheck:
    """Compares `parameters` over the ranks, one window every `every` rounds. Constructing it is a collective.

    When, and which window, follows from the number of the epoch alone, which ranks count alike also when one failed.
    """

    def __init__(self, communicator: Communicator, parameters: Sequence[tuple[str, Tensor]], every: int) -> None:
        self._communicator = communicator
        self._every = every
        self.epochs_per_round = 1
        self._windows = cut_windows(parameters)
        world_size = communicator.group.world_size
        self._sums = communicator.empty(world_size * WINDOW_PIECES, torch.int64)
        self._plan = communicator.plan_all_reduce(self._sums)
        self._running: tuple[list[Piece], int, Pending] | None = None

    def start(self, epoch: int, round_number: int) -> None:
        """Called as a round begins; once in `every` times a check begins with it."""
        period = self._every * self.epochs_per_round
        if epoch % period >= self.epochs_per_round or not self._windows:
            return
        if self._running is not None:
            self._read()
        window = self._windows[epoch // period % len(self._windows)]
        self._sums.zero_()
        begin = self._communicator.group.rank * WINDOW_PIECES
        self._sums[begin : begin + len(window)] = torch.stack([checksum(piece) for piece in window])
        self._running = (window, round_number, self._communicator.start(self._plan.run))

    def finish(self) -> None:
        """Called as a round ends; raises ReplicasDrifted, on every rank alike. On CUDA that is one check late."""
        if self._running is not None and self._sums.device.type == "cpu":
            self._read()

    def forget(self) -> None:
        """Called when a round failed: nobody will read the check that began with it."""
        self._running = None

    def _read(self) -> None:
        assert self._running is not None
        (window, rounds, pending), self._running = self._running, None
        self._communicator.wait(pending)
        rows = self._sums.view(-1, WINDOW_PIECES).tolist()
        for number, piece in enumerate(window):
            sums = [row[number] for row in rows]
            if len(set(sums)) > 1:
                raise ReplicasDrifted(_text(piece, sums, rounds))


def cut_windows(parameters: Sequence[tuple[str, Tensor]]) -> list[list[Piece]]:
    """Pieces in windows of at most WINDOW_BYTES and WINDOW_PIECES."""
    windows: list[list[Piece]] = []
    room, most = 0, WINDOW_BYTES
    for name, param in parameters:
        begin = 0
        while begin < param.numel():
            if not windows or room < param.element_size() or len(windows[-1]) == WINDOW_PIECES:
                windows.append([])
                room = most
            end = min(param.numel(), begin + room // param.element_size())
            windows[-1].append(Piece(name, param, begin, end))
            room -= (end - begin) * param.element_size()
            begin = end
    return windows


def checksum(piece: Piece) -> Tensor:
    """The sum of a piece's bits, read as integers: a 0-dim int64 tensor on its device."""
    param = piece.param.detach()
    if is_dense(param):
        flat = param.as_strided((param.numel(),), (1,))
    else:
        flat = param.contiguous().view(-1)
    part = flat[piece.begin : piece.end]
    if part.is_complex():
        part = torch.view_as_real(part)
    return part.view(INTEGERS[part.element_size()]).sum(dtype=torch.int64)


def _text(piece: Piece, sums: list[int], rounds: int) -> str:
    common = Counter(sums).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(sums) if value != common]
    others = "rank" if len(sums) - len(odd) == 1 else "ranks"
    return (
        f"replicas have drifted apart: parameter {piece.name} of {ranks_text(odd)} differs from that of the other "
        f"{others} (seen at synchronised backward {rounds}, before its step). Something changed it on some ranks "
        "alone: an edit outside the optimizer, a step on local gradients, a hook that does not average, or optimizers "
        "with different settings. If replicas are to differ here, pass check_replicas_every=0."
    )

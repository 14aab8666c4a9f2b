"""What one synchronised backward looked like from this rank: all times in seconds on time.perf_counter."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PHASES = ("input", "forward", "backward")
NOTICED_S = 1e-3  # less is not worth a name
NOTICED_SHARE = 0.05  # of what the median rank computes in a step


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One rank's own time in a step: `input_s` is all outside forward and backward since the last round (data loading,
    optimizer, the loss), without waiting for peers."""

    input_s: float
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.input_s + self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that came last in a step by more than noise: `excess_s` above the median of the others, in `phase`."""

    rank: int
    phase: str
    excess_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} was {self.excess_s * 1e3:.1f} ms slower than the others in its {self.phase}"


def find_straggler(ranks: Sequence[PhaseTimes]) -> Straggler | None:
    """The rank with the longest step, if it exceeds the median of the others by NOTICED_S and NOTICED_SHARE."""
    if len(ranks) < 2:
        return None
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].total_s)
    others = [times for rank, times in enumerate(ranks) if rank != slowest]
    excess_s = {
        phase: getattr(ranks[slowest], f"{phase}_s")
        - statistics.median(getattr(times, f"{phase}_s") for times in others)
        for phase in PHASES
    }
    phase = max(PHASES, key=lambda name: excess_s[name])
    median_s = statistics.median(times.total_s for times in others)
    late_s = ranks[slowest].total_s - median_s
    if late_s < max(NOTICED_S, NOTICED_SHARE * median_s):
        return None
    return Straggler(slowest, phase, excess_s[phase])


@dataclass(frozen=True, slots=True)
class BucketStats:
    """One bucket's life. `peer_wait_s` is the part of its communication spent waiting for peers, `last_peer` the one
    waited for longest (this rank itself if it came last). Start and end are None on CUDA until the device has run."""

    index: int
    nbytes: int
    algorithm: str
    ready_s: float
    launched_s: float
    started_s: float | None
    ended_s: float | None
    wait_began_s: float
    wait_ended_s: float
    peer_wait_s: float
    last_peer: int


@dataclass(frozen=True, slots=True)
class StepStats:
    """One round: backward from `backward_began_s` to `backward_ended_s`, then waiting until `done_s`."""

    round: int
    backward_began_s: float
    backward_ended_s: float
    wait_began_s: float
    done_s: float
    buckets: tuple[BucketStats, ...]
    ranks: tuple[PhaseTimes, ...] = ()  # every rank's phases; empty where they are not known

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others waited for, and the phase in which it lost the time; None where none stands out."""
        return find_straggler(self.ranks)

    @property
    def longest_wait(self) -> BucketStats | None:
        """The bucket that waited longest for peers; on a straggler itself that says little."""
        return max(self.buckets, key=lambda bucket: bucket.peer_wait_s, default=None)

    @property
    def communication_s(self) -> float:
        """Time the communication stream was busy. It runs one bucket at a time, so the intervals do not overlap."""
        return sum(b.ended_s - b.started_s for b in self.buckets if b.started_s is not None and b.ended_s is not None)

    @property
    def exposed_s(self) -> float:
        """The part of `communication_s` after backward had ended: nothing else was going on."""
        return sum(
            max(0.0, b.ended_s - max(b.started_s, self.backward_ended_s))
            for b in self.buckets
            if b.started_s is not None and b.ended_s is not None
        )

    @property
    def waited_s(self) -> float:
        """Time the compute side stood still for communication."""
        return sum(b.wait_ended_s - b.wait_began_s for b in self.buckets)

    @property
    def peer_wait_s(self) -> float:
        """Time within communication spent waiting for peers rather than moving bytes."""
        return sum(b.peer_wait_s for b in self.buckets)

    @property
    def overlap(self) -> float:
        """Share of communication hidden under backward, 0 to 1; 0 when there was none."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s else 0.0

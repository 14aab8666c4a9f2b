"""What one synchronised backward looked like from this rank: all times in seconds on time.perf_counter."""

from dataclasses import dataclass


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

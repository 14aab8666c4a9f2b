"""A round in numbers: what this rank notes of it, made into a `StepStats` when somebody asks.

Not before, since on CUDA the device may still be running what the round launched.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from ddpx.arena import Bucket
from ddpx.stats import BucketStats, PhaseTimes, StepStats


class Recorder:
    """Of the last round, and of the time since then."""

    def __init__(self) -> None:
        self.forward_s = 0.0  # spent in forwards since the last round, without waiting for buffers
        self._done_s = time.perf_counter()  # when the last round ended
        self._last: StepStats | None = None
        self._buckets: Sequence[Bucket] = ()  # of the last round, until all their times are known

    def begin(self) -> None:
        """A round begins, which uses buckets anew: what is known of the last one stays."""
        self._last, self._buckets = self.last_step, ()

    def phases(self, began_s: float, ended_s: float) -> PhaseTimes:
        """This rank's own times, of a round whose backward has ended."""
        outside_s = began_s - self._done_s - self.forward_s
        return PhaseTimes(max(0.0, outside_s), self.forward_s, ended_s - began_s)

    def end(self, step: StepStats, buckets: Sequence[Bucket]) -> None:
        """A round is done: `step`, still without its buckets."""
        self.forward_s, self._done_s = 0.0, step.done_s
        self._last, self._buckets = step, buckets

    @property
    def last_step(self) -> StepStats | None:
        if self._last is not None and self._buckets:
            self._last = replace(self._last, buckets=tuple(_stats_of(bucket) for bucket in self._buckets))
            if all(bucket.ended_s is not None for bucket in self._last.buckets):
                self._buckets = ()
        return self._last


def _stats_of(bucket: Bucket) -> BucketStats:
    pending = bucket.pending
    assert pending is not None
    return BucketStats(
        bucket.index,
        bucket.flat.nbytes,
        bucket.algorithm,
        bucket.ready_s,
        bucket.launched_s,
        pending.started_s,
        pending.ended_s,
        *bucket.waited_s,
        bucket.plan.peer_wait_s,
        bucket.plan.last_peer,
    )

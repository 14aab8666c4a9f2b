"""What torch's stock hooks and frameworks ask DDP's reducer for, which they find as `model.reducer`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpx.comm_hooks import GradBucket, run_allreduce
from ddpx.reducer import Reducer


class DDPReducer(Reducer):
    """A reducer under the names of DDP's."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """DDP has to be told of a backward; here it is noticed when it comes, wherever it begins."""
        self.expects_backward_anywhere = True

    def _get_local_used_map(self) -> Tensor:
        """By parameter: how many ranks had a gradient for it in the last round; with find_unused_parameters."""
        return self.unused.used_counts()

    def _ddp_graph_static(self) -> bool:
        return not self.unused.graph_changed

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Buckets are laid out anew when the first round ends."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return run_allreduce(bucket, self.communicator.group.process_group)

    def get_backward_stats(self) -> list[int]:
        """By parameter: nanoseconds from the beginning of the last round until its buckets were full."""
        step = self.recorder.last_step
        if step is None:
            return [0] * len(self.slots)
        return [
            max(
                (int((self.buckets[number].ready_s - step.backward_began_s) * 1e9) for number in slot.buckets),
                default=0,
            )
            for slot in self.slots
        ]

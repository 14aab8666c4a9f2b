"""How gradients are reduced, as data: what every rank has to agree on, and each mode as a policy of few switches."""

from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["naive", "bucketed", "overlapped"]
NonFinite = Literal["ignore", "warn", "error"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How buckets are cut, and when they launch."""

    one_per_parameter: bool
    launch_when_full: bool
    wait_for_each: bool


POLICIES: dict[str, Policy] = {
    "naive": Policy(one_per_parameter=True, launch_when_full=False, wait_for_each=True),
    "bucketed": Policy(one_per_parameter=False, launch_when_full=False, wait_for_each=False),
    "overlapped": Policy(one_per_parameter=False, launch_when_full=True, wait_for_each=False),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How gradients are reduced, as every rank has to agree on it.

    `find_unused` lets parameters go without a gradient; they count as zero where another rank has one, and keep their
    `grad` where no rank has. `static` adds a promise: each rank's set of them stays that of its first round.
    `exclude_unused` adds another: what no rank used in the first round is left out of all later ones.
    """

    mode: Mode = "overlapped"
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int | None = None
    bucket_bytes_list: tuple[int, ...] = ()
    find_unused: bool = False
    static: bool = False
    exclude_unused: bool = False
    gradients_are_views: bool = True
    wire_dtype: torch.dtype | None = None  # of floating-point gradients in buckets; None: as their parameters
    nonfinite: NonFinite = "ignore"
    check_replicas_every: int = 0  # rounds; 0: never

"""DDP's constructor arguments, made into ours: defaults, deprecations, and what is refused."""

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpx.guard import LocalSteps
from ddpx.options import Options
from ddpx.transport import Link

DEFAULT_BUCKET_MB = 25.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """In bytes. `first` is None where the planner may choose a small one."""

    bucket_bytes: int
    first: int | None
    listed: tuple[int, ...]


def bucket_sizes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> BucketSizes:
    """A size not above zero means the default, as DDP accepts it too."""
    if bucket_cap_mb_list:
        if min(bucket_cap_mb_list) <= 0:
            raise ValueError(f"bucket_cap_mb_list has sizes in MiB above zero, not {list(bucket_cap_mb_list)}")
        listed = tuple(max(1, int(cap * MIB)) for cap in bucket_cap_mb_list)
        return BucketSizes(max(listed), None, listed)
    cap = DEFAULT_BUCKET_MB if bucket_cap_mb is None or bucket_cap_mb <= 0 else bucket_cap_mb
    return BucketSizes(max(1, int(cap * MIB)), None, ())


def buffer_rules(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether to share buffers before forwards, and at construction. Warns as DDP does."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided.",
            FutureWarning,
            stacklevel=3,
        )
    elif broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at init.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    share = True if broadcast_buffers is None else broadcast_buffers
    return share, share


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup | None:
    """The process group meant; None without torch.distributed. RuntimeError for both, or a mesh not of one axis."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return process_group


def delayed_names(delayed: Sequence[tuple[str, torch.nn.Parameter]] | None, hooked: Any) -> frozenset[str]:
    """Names whose reduction is to come last. DDP wants both arguments or none."""
    if (delayed is None) != (hooked is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    return frozenset(name for name, _ in delayed or ())


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Types of computation, reduction and buffers; None leaves as is. As torch's `_MixedPrecision`, but picklable."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: Any) -> "MixedPrecision | None":
        """From torch's own configuration object; a field not known here is refused."""
        if config is None or isinstance(config, cls):
            return config
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {field.name for field in dataclasses.fields(config)}
        if fields - known:
            raise ValueError(f"mixed_precision has fields that ddpx does not know: {', '.join(sorted(fields - known))}")
        return cls(**{name: getattr(config, name) for name in fields})

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What gradients travel in: DDP's rule is reduce_dtype, else param_dtype."""
        return self.reduce_dtype or self.param_dtype


@dataclass(frozen=True, slots=True)
class Terms:
    """What else a wrapper needs to know to join its peers, now or, for a copy, later."""

    options: Options
    algorithm: str
    transport: str
    link: Link | None
    timeout_s: float | None
    init_sync: bool
    share_buffers: bool  # at the start
    delayed: frozenset[str]
    local_steps: LocalSteps

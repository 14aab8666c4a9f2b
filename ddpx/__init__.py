"""Data-parallel training for PyTorch that its users can read, trust and look inside.

Names are imported when they are first used, so that reading traces or pricing a collective does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpx.communicator import Communicator
    from ddpx.data_parallel import DDPX, sync_grads
    from ddpx.errors import (
        DeadlineExceeded,
        Error,
        Mismatch,
        NonFiniteGradient,
        ParametersChanged,
        PeerFailed,
        PeerLost,
        ReplicasDrifted,
        UnsynchronisedStep,
        UnusedParameters,
    )
    from ddpx.stats import BucketStats, StepStats
    from ddpx.transport import Link

__version__ = "0.1.0"

__all__ = [
    "DDPX",
    "BucketStats",
    "Communicator",
    "DeadlineExceeded",
    "Error",
    "Link",
    "Mismatch",
    "NonFiniteGradient",
    "ParametersChanged",
    "PeerFailed",
    "PeerLost",
    "ReplicasDrifted",
    "StepStats",
    "UnsynchronisedStep",
    "UnusedParameters",
    "sync_grads",
]

_HOMES = {
    "Communicator": "communicator",
    "DDPX": "data_parallel",
    "sync_grads": "data_parallel",
    "BucketStats": "stats",
    "StepStats": "stats",
    "Link": "transport",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ddpx' has no attribute {name!r}")
    return getattr(import_module(f"ddpx.{_HOMES.get(name, 'errors')}"), name)

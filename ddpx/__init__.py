"""Data-parallel training for PyTorch that its users can read, trust and look inside."""

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

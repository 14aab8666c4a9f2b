"""What can go wrong at run time, as a small family that callers can catch as one.

Wrong arguments are `ValueError` or `TypeError`, raised before anything is sent. Everything here is raised on every rank
that waits for the failing one, so that a job ends with a sentence and not with a time-out.
"""


class Error(RuntimeError):
    """Any failure of a training group at run time."""


class PeerLost(Error):
    """A rank's process ended, or its connection closed, while others still needed it."""


class PeerFailed(Error):
    """A rank reported that its own forward or backward failed; its words are in the message."""


class DeadlineExceeded(Error):
    """A rank did not come within the deadline; the message names it and what was waited for."""


class Mismatch(Error):
    """Ranks disagree on what they run: another model, another order of steps, another collective."""


class UnusedParameters(Error):
    """Parameters got no gradient in a backward that has to synchronise all of them."""


class ParametersChanged(Error):
    """A parameter was added, replaced, removed, re-typed, moved, frozen or unfrozen after the model was wrapped."""


class UnsynchronisedStep(Error):
    """An optimizer was about to step on gradients that no backward has reduced over the ranks."""


class ReplicasDrifted(Error):
    """Parameters that have to be equal on all ranks are not."""


class NonFiniteGradient(Error):
    """A gradient had NaN or infinity in it before it was reduced; the message names rank, parameter and step."""

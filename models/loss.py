"""The one loss that all models here train on."""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of `logits` (..., classes) against class numbers `targets` (...).

    Computed in fp32 at least: a bf16 loss has three digits, too few to compare two runs by.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten())

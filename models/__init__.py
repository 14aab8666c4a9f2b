"""Models to train, in plain torch, and the data to train them on. Nothing here knows ddpx.

Each model's `forward(inputs, targets)` returns `(logits, loss)`, and each comes as "nano", "small" and "medium".
"""

from torch import nn

from models.gpt import GPT, GPTConfig
from models.mlp import MLP
from models.resnet import ResNet

__all__ = ["MODELS", "GPT", "MLP", "GPTConfig", "ResNet", "build"]

MODELS = ("gpt", "mlp", "resnet")


def build(name: str, size: str, vocab_size: int = 256, block_size: int = 128, classes: int = 10) -> nn.Module:
    """Build a model by name and size; `vocab_size` and `block_size` are for text models, `classes` for resnet."""
    match name:
        case "gpt":
            return GPT.from_size(size, vocab_size, block_size)
        case "mlp":
            return MLP.from_size(size, vocab_size)
        case "resnet":
            return ResNet.from_size(size, classes)
    raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")

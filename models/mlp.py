"""A language model without attention: the embeddings of the last few tokens, in a row, through an MLP (Bengio 2003).

Takes the same batches as `models.gpt`; has few, large parameters, so it is heavy on communication for what it computes.
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from models.loss import cross_entropy

SIZES: dict[str, tuple[int, int, int, int]] = {  # context (tokens), width of an embedding, width of a layer, layers
    "nano": (16, 32, 1024, 3),  # 2.9 M parameters on bytes
    "small": (32, 64, 2048, 6),  # 26 M
    "medium": (32, 64, 4096, 7),  # 110 M
}


class MLP(nn.Module):
    """Predicts the next token at every position from the `context` tokens that end there."""

    def __init__(self, context: int, embedding_width: int, width: int, layers: int, vocab_size: int = 256) -> None:
        super().__init__()
        if min(context, embedding_width, width, layers, vocab_size) < 1:
            raise ValueError("MLP needs a context, widths, layers and a vocab_size of at least 1")
        self.context = context
        self.embedding = nn.Embedding(vocab_size, embedding_width)
        widths = [context * embedding_width] + [width] * layers
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    @classmethod
    def from_size(cls, size: str, vocab_size: int = 256) -> "MLP":
        """Build the model called "nano", "small" or "medium"."""
        if size not in SIZES:
            raise ValueError(f"mlp has no size {size!r}; its sizes are {', '.join(SIZES)}")
        return cls(*SIZES[size], vocab_size)

    def forward(
        self,
        tokens: Tensor,  # (batch, time) int64
        targets: Tensor | None = None,  # (batch, time) int64: the token that follows each
    ) -> tuple[Tensor, Tensor | None]:  # logits (batch, time, vocab_size), the mean loss
        before = F.pad(self.embedding(tokens), (0, 0, self.context - 1, 0))  # what precedes the sequence counts as zero
        x = before.unfold(1, self.context, 1).flatten(2)  # (batch, time, embedding_width * context)
        for layer in self.layers:
            x = F.gelu(layer(x))
        logits = self.head(self.norm(x))
        return logits, None if targets is None else cross_entropy(logits, targets)

"""A GPT-2 style transformer in plain torch: the nanoGPT class of model, small enough to read.

    embedding + position -> [x + attention(LayerNorm(x)); x + mlp(LayerNorm(x))] * layers -> LayerNorm -> head

`GPT.from_size("nano", vocab_size=256, block_size=128)` builds one; `forward(tokens, targets)` returns `(logits, loss)`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.loss import cross_entropy

Attention = Literal["sdpa", "manual"]

SIZES: dict[str, tuple[int, int, int]] = {  # layers, heads, width
    "nano": (6, 4, 256),  # 4.8 M parameters
    "small": (12, 12, 768),  # 85 M on bytes; 124 M with GPT-2's vocabulary and 1024 positions
    "medium": (24, 16, 1024),  # 303 M on bytes; 355 M likewise
}


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a GPT. `attention="manual"` spells attention out in matrix products, which any tool can count."""

    layers: int
    heads: int
    width: int
    vocab_size: int = 256
    block_size: int = 128
    bias: bool = True
    tied: bool = True  # the head shares the embedding's weight
    dropout: float = 0.0
    attention: Attention = "sdpa"

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "vocab_size", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPT needs {name} of at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"GPT needs a width that its heads divide, got width {self.width} and {self.heads} heads")
        if self.attention not in ("sdpa", "manual"):
            raise ValueError(f"attention is 'sdpa' or 'manual', got {self.attention!r}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention = config.attention
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        dropout = self.dropout if self.training else 0.0
        if self.attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            y = F.dropout(weights, dropout) @ v
        return F.dropout(self.proj(y.transpose(1, 2).reshape(batch, time, width)), dropout)


class Block(nn.Module):
    """Attention, then a two-layer MLP four times as wide, each on a residual branch behind a LayerNorm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = CausalSelfAttention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=config.bias)
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next token at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.apply(self._initialise)

    @classmethod
    def from_size(
        cls,
        size: str,
        vocab_size: int = 256,
        block_size: int = 128,
        *,
        bias: bool = True,
        tied: bool = True,
        dropout: float = 0.0,
        attention: Attention = "sdpa",
    ) -> "GPT":
        """Build the model called "nano", "small" (the 124 M class) or "medium" (the 350 M class)."""
        if size not in SIZES:
            raise ValueError(f"gpt has no size {size!r}; its sizes are {', '.join(SIZES)}")
        return cls(GPTConfig(*SIZES[size], vocab_size, block_size, bias, tied, dropout, attention))

    def _initialise(self, module: nn.Module) -> None:
        """Initialise as GPT-2: normal(0.02), smaller where a residual branch ends, so that depth adds no variance."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # apply() comes to a module after its children
            for last in (module.attention.proj, module.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def matmul_parameters(self) -> int:
        """Return N of the PaLM formula: parameters but for those only looked up (positions, an untied embedding)."""
        looked_up = self.position.weight.numel() + (0 if self.config.tied else self.embedding.weight.numel())
        return sum(parameter.numel() for parameter in self.parameters()) - looked_up

    def forward(
        self,
        tokens: Tensor,  # (batch, time) int64
        targets: Tensor | None = None,  # (batch, time) int64: the token that follows each
    ) -> tuple[Tensor, Tensor | None]:  # logits (batch, time, vocab_size), the mean loss
        time = tokens.size(1)
        if time > self.config.block_size:
            raise ValueError(f"a sequence of {time} tokens does not fit this GPT's {self.config.block_size} positions")
        x = self.embedding(tokens) + self.position(torch.arange(time, device=tokens.device))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else cross_entropy(logits, targets)

"""ResNet for 32 x 32 images (He et al. 2015) in plain torch: the ImageNet network with a 3 x 3 stem and no max-pooling.

Its BatchNorm layers have buffers, and its parameters range from 64 numbers to 2.4 million: a good test of bucketing.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from models.loss import cross_entropy

SIZES: dict[str, tuple[int, tuple[int, ...]]] = {  # channels of the first stage, blocks a stage
    "nano": (16, (1, 1, 1, 1)),  # 0.3 M parameters
    "small": (64, (2, 2, 2, 2)),  # ResNet-18, 11 M
    "medium": (64, (3, 4, 6, 3)),  # ResNet-34, 21 M
}


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut; the first may halve the image."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Classifies images: stages of blocks, each stage at half the resolution and twice the channels."""

    def __init__(self, channels: int, blocks: tuple[int, ...], classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        stages: list[nn.Module] = []
        width = channels
        for stage, count in enumerate(blocks):
            for index in range(count):
                wider = channels * 2**stage
                stages.append(Block(width, wider, stride=2 if stage > 0 and index == 0 else 1))
                width = wider
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(width, classes)

    @classmethod
    def from_size(cls, size: str, classes: int = 10) -> "ResNet":
        """Build the model called "nano", "small" (ResNet-18) or "medium" (ResNet-34)."""
        if size not in SIZES:
            raise ValueError(f"resnet has no size {size!r}; its sizes are {', '.join(SIZES)}")
        return cls(*SIZES[size], classes)

    def forward(
        self,
        images: Tensor,  # (batch, 3, height, width)
        labels: Tensor | None = None,  # (batch,) int64
    ) -> tuple[Tensor, Tensor | None]:  # logits (batch, classes), the mean loss
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        logits = self.head(x.mean((2, 3)))
        return logits, None if labels is None else cross_entropy(logits, labels)

"""The models of the step benchmark, each with a batch for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig


class Model(NamedTuple):
    """How to build a model, the same on all ranks, and inputs for one step."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


def square_layers(count: int, width: int) -> nn.Module:
    """`count` linear layers without bias, so that each is one parameter of width x width."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = _conv(inputs, width, 1)
        self.convolve = _conv(width, width, 3, stride)  # the stride here: "version 1.5"
        self.expand = _conv(width, outputs, 1)
        is_same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if is_same else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.convolve(torch.relu(self.reduce(x))))
        return torch.relu(self.expand(y) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 for 1,000 classes (He et al. 2015, table 1): 25,557,032 parameters, 161 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 64, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks = []
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, stride if index == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.pool(torch.relu(self.stem(images))))
        return self.head(x.mean((2, 3)))


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build_seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return build_seeded


_GPT = GPTConfig(vocabulary=96, context=128, layers=6, heads=6, width=192, dropout=0.0)

# Small batches: the less there is to compute, the more synchronisation shows.
MODELS = {
    "small": Model(
        "400 layers of 64x64", _seeded(lambda: square_layers(400, 64)), lambda: torch.randn(8, 64)
    ),
    "large": Model(
        "12 layers of 1024x1024",
        _seeded(lambda: square_layers(12, 1024)),
        lambda: torch.randn(8, 1024),
    ),
    "gpt": Model(
        "GPT, 6 layers of width 192",
        _seeded(lambda: GPT(_GPT)),
        lambda: torch.randint(_GPT.vocabulary, (2, _GPT.context)),
    ),
    "resnet50": Model(
        "ResNet-50, 2 images of 64x64", _seeded(ResNet50), lambda: torch.randn(2, 3, 64, 64)
    ),
}

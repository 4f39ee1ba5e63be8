"""A small GPT at character level: the model alone, for the example and the benchmark.

Shapes in comments: B sequences, T characters, C channels, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        vocabulary: how many different characters there are.
        context: the longest sequence, in characters.
        layers: number of blocks.
        heads: attention heads of a block; divides `width`.
        width: channels of the residual stream.
        dropout: probability with which an activation is dropped in training.
    """

    vocabulary: int
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width: expected a multiple of heads ({self.heads}), found {self.width}"
            )


class Block(nn.Module):
    """Attention to what came before, then a multi-layer perceptron, each added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        batch, length, width = x.shape
        qkv = self.query_key_value(self.before_attention(x))
        query, key, value = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(  # [B, H, T, C / H]
            query, key, value, dropout_p=dropout, is_causal=True
        )
        x = x + self.drop(self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.characters.weight  # tied
        self.apply(_initialise)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Runs the model.

        Args:
            ids: int64, [B, T], T at most `context`.
            targets: int64, [B, T], the characters to predict.

        Returns:
            The mean cross entropy in nats (fp32, 0-dim); without targets the logits,
            [B, T, vocabulary].
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.characters(ids) + self.positions(positions))
        logits = self.head(self.norm(self.blocks(x)))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def sample(self, ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """`ids` ([1, T], int64) followed by `count` drawn characters; evaluation mode is up to
        the caller."""
        for _ in range(count):
            logits = self(ids[:, -self.config.context :])[:, -1].float()
            drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
            ids = torch.cat([ids, drawn.to(ids.device)], dim=1)
        return ids


def _initialise(module: nn.Module) -> None:
    # As GPT-2: normal with a standard deviation of 0.02, biases at zero.
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

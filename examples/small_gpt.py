"""A small GPT, as plain as it can be, for the examples that train one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Block", "SmallGpt"]


class SmallGpt(nn.Module):
    """Predicts the next token at every place.

    Args:
        num_tokens: of the alphabet.
        width: of what stands for a token, a multiple of ``num_heads``.
        depth: number of blocks.
        num_heads: of the attention in each block.
        context: most tokens that are looked at.
    """

    def __init__(self, num_tokens: int, width: int, depth: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(num_tokens, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens`` are (batch, length). Returns the mean loss if there are targets, else the logits, (batch, length,
        num_tokens)."""
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention, and a network of two layers, each added to what comes in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        parts = self.project(self.norm(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        query, key, value = parts.unbind(2)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).flatten(-2))
        return x + self.network(x)

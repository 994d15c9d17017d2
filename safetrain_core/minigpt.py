"""MiniGPT: a small decoder-only transformer, something real to train on a laptop.

Pre-norm blocks, learned positions, GELU, no biases in attention. Source of the shape: Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners"; of the scaled residual init, the same paper, section 2.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MiniGPT", "MiniGPTConfig", "next_token_loss"]


@dataclass(frozen=True, slots=True)
class MiniGPTConfig:
    """The size of a MiniGPT.

    Args:
        vocab_size: number of token ids.
        context: longest sequence, in tokens.
        layers: number of blocks. heads: attention heads per block. width: model width d, a multiple of heads.
        dropout: probability, after attention and MLP.
        tied: the output head shares the token embedding's weight.

    Raises:
        ValueError: a size below 1, dropout outside 0..1, or a width that the heads do not divide.

    >>> MiniGPTConfig(vocab_size=96, width=30, heads=4)
    Traceback (most recent call last):
    ...
    ValueError: width=30 is not a multiple of heads=4; use for example width=32
    """

    vocab_size: int
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.width % self.heads:
            nearest = self.heads * math.ceil(self.width / self.heads)
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; use for example width={nearest}"
            )


class AttentionCore(nn.Module):
    """Scores, softmax and mix, without weights: q, k, v (B, heads, T, d / heads) -> the same shape."""

    #: What the recompute policy ``selective`` looks for.
    is_attention_core = True

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)


class Attention(nn.Module):
    """Causal self-attention: (B, T, d) -> (B, T, d)."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.core = AttentionCore(config.dropout)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = self.core(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, d) -> (B, T, d)."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.attention = nn.LayerNorm(width), Attention(config)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class MiniGPT(nn.Module):
    """Token ids (B, T), int64, T <= context -> logits (B, T, vocab_size).

    Raises:
        ValueError: a sequence longer than the context.

    >>> import torch
    >>> model = MiniGPT(MiniGPTConfig(vocab_size=10, context=8, layers=1, heads=2, width=16))
    >>> model(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 5, 10])
    """

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at each position; shapes as above."""
        length = ids.shape[1]
        if length > self.config.context:
            raise ValueError(f"sequence of {length} tokens, but the context is {self.config.context}; cut it")
        x = self.tokens(ids) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; targets of -100 are left out.

    Args:
        logits: (B, T, vocab). targets: (B, T), int64, the ids one position ahead.

    >>> import torch
    >>> round(next_token_loss(torch.zeros(1, 2, 4), torch.tensor([[1, 3]])).item(), 4)  # ln 4
    1.3863
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

# SPDX-License-Identifier: Apache-2.0
"""The model of the phase bench: a decoder-only GPT of about 110 M parameters, untied head."""

import pathlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 16384
    length: int = 64


SIZES = {"110M": Size(), "smoke": Size(layers=2, width=64, heads=2, vocab=256, length=16)}


def has_bf16_products():
    """Whether the processor multiplies bfloat16 itself. Where not, torch's products of bfloat16
    matrices take tens of seconds for one backward of this model."""
    flags = set(pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


class Linear(nn.Linear):
    """bfloat16 parameters, input and output; where it is faster, the product is of float32."""

    widened = not has_bf16_products()

    def forward(self, x):
        if not self.widened:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = Linear(size.width, 3 * size.width)
        self.out = Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = Linear(size.width, 4 * size.width)
        self.down = Linear(4 * size.width, size.width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        return functional.cross_entropy(logits, tokens.flatten())

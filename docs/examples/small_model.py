"""A small causal language model and sequences that it can learn, for the scripts beside it."""

import torch
from torch import nn
from torch.nn import functional

VOCAB, LENGTH, BATCH, WIDTH, HEADS = 64, 32, 8, 64, 4


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and around a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        size, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(size, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(size, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(number, device="cpu"):
    """Sequences that count up from a random start, by 1 to 3."""
    generator = torch.Generator().manual_seed(number)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return ((start + stride * torch.arange(LENGTH + 1)) % VOCAB).to(device)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

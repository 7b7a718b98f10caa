# SPDX-License-Identifier: Apache-2.0
"""Forebay as the benches of one rank drive it: the daemon holds the states and updates."""

import torch

import ours


class Forebay:
    """Shared attachment in bf16, AdamW, the gradient's norm clipped.

    options  Of forebay.attach(), beside that.
    """

    def __init__(self, model, clip, **options):
        import forebay

        self.model = model.to(torch.bfloat16)
        rule = forebay.AdamW(lr=ours.LR, weight_decay=ours.WEIGHT_DECAY, max_grad_norm=clip)
        self.opt = forebay.attach(self.model, rule, **options)

    def forward(self, tokens):
        return self.model(tokens)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.opt.step()

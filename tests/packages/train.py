# SPDX-License-Identifier: Apache-2.0
"""What tests/packages/run trains below a bare root: a few steps beside plain torch."""

import copy
import os

import forebay
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
plain = copy.deepcopy(model)
expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
for step in range(3):
    torch.manual_seed(step)
    x = torch.randn(8, 16)
    losses = []
    for net, optimizer in ((model, opt), (plain, expected)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), x[:, :4])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) <= 1e-5 * losses[1], losses
if os.environ.get("RANK", "0") == "0":
    print(f"  holds  losses are those of plain torch, with {os.environ.get('WORLD_SIZE', '1')} rank(s)")

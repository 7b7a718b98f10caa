"""A training loop in plain PyTorch: parameter groups, a learning-rate schedule, clipping, evaluation, a checkpoint."""

import torch
from small_model import Model, batch, loss_of

STEPS = 20

torch.manual_seed(0)
model = Model()
matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

for step in range(STEPS):
    loss = loss_of(model, batch(step))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step + 1} loss {loss.item():.5f}", flush=True)

with torch.no_grad():
    print(f"held out {loss_of(model, batch(STEPS)).item():.5f}")
torch.save(model.state_dict(), "model.pt")

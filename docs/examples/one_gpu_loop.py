"""A training loop for one GPU: the model, its gradients and the optimizer's states all in its memory."""

import torch
from small_model import Model, batch, loss_of

STEPS = 20

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
with torch.device(device):
    model = Model().to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(STEPS):
    loss = loss_of(model, batch(step, device))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} loss {loss.item():.5f}", flush=True)

torch.save(model.state_dict(), "model.pt")

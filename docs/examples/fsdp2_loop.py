"""A training loop with FSDP2 on the CPUs of one node: sharded layers, mixed precision, two backward passes a step."""

import torch
from small_model import Model, batch, loss_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 10

torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
model = Model()
policy = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
for layer in model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(STEPS):
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        loss = loss_of(model, batch((2 * step + part) * world + rank))
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.5f}", flush=True)

state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save(state, "model.pt")
torch.distributed.destroy_process_group()

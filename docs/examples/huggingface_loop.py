"""Trains a small GPT-2 with random weights in a loop written by hand, as Accelerate's documentation has it.
Argument: the folder to write to."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
words = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(words, batch_size=8, shuffle=True)
scheduler = get_linear_schedule_with_warmup(optimizer, 4, 2 * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for epoch in range(2):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.unwrap_model(model).save_pretrained(sys.argv[1], is_main_process=accelerator.is_main_process)
accelerator.print(f"loss {accelerator.gather(loss).mean().item()}")

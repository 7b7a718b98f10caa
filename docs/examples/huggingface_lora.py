"""Trains adapters of peft, in float32, on a frozen GPT-2 in bfloat16 with random weights. Argument: the folder to
write to."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

torch.manual_seed(1)
base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
model = get_peft_model(base.to(torch.bfloat16), LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM"))
words = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": line, "labels": line} for line in words]
arguments = TrainingArguments(
    sys.argv[1], use_cpu=True, num_train_epochs=2, learning_rate=1e-2, report_to=[], disable_tqdm=True
)
trainer = Trainer(model, arguments, data_collator=default_data_collator, train_dataset=data, eval_dataset=data)
trainer.train()
trainer.save_model()  # the adapters alone
print(f"loss {trainer.evaluate()['eval_loss']}")

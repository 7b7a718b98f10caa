"""Trains a small BERT with random weights to tell odd first words from even ones: Hugging Face's Trainer, as people
write it. Argument: the folder to write to."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        self.words = torch.randint(1, 64, (count, 16), generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "labels": words[0] % 2}


torch.manual_seed(1)
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    sys.argv[1],
    use_cpu=True,
    num_train_epochs=2,
    learning_rate=1e-3,
    weight_decay=0.01,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Sentences(64), eval_dataset=Sentences(32))
trainer.train()
print(f"loss {trainer.evaluate()['eval_loss']}")

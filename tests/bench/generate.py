# SPDX-License-Identifier: Apache-2.0
"""Times a token of transformers' generate() on an attached model beside the same model in plain torch, in turns.

usage: forebay run --dram 1GiB -- python tests/bench/generate.py [ROUNDS]

Small models, whose layers take little time: the other costs of a forward show most with these models.
"""

import copy
import os
import statistics
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import forebay
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

TOKENS = 64
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=2000)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=6, hidden_size=256, intermediate_size=512, num_attention_heads=4, vocab_size=2000
        )
    ),
}


def timed(model, prompt):
    began = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    return (time.perf_counter() - began) / TOKENS, tokens


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for name, make in MODELS.items():
        model = make().eval()
        plain = copy.deepcopy(model)
        opt = forebay.attach(model, forebay.AdamW(lr=1e-3), job=name)
        prompt = torch.randint(2000, (1, 8))
        timed(model, prompt), timed(plain, prompt)
        ratios = []
        for _ in range(rounds):
            (ours, tokens), (theirs, others) = timed(model, prompt), timed(plain, prompt)
            assert torch.equal(tokens, others)
            ratios.append(ours / theirs)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: a token takes {middle:.2f} of plain torch's time, quartiles {low:.2f} and {high:.2f}")
        opt.detach()


main()

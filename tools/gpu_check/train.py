#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One rank of gpu_check: trains a Llama-shaped model on one device and prints a JSON line of figures for each number of
sequences a step.

--who  compute    forward and backward alone, weights and gradients on the device: what nothing can beat
       forebay    FSDP2 with Forebay: states in the daemon of FOREBAY_SOCKET
       offload    FSDP2 with CPUOffloadPolicy and torch's fused AdamW
       deepspeed  ZeRO-3 with DeepSpeed's CPU Adam; weights and gradients stay on the device

The parameters are float32 and compute is in bfloat16, as with torch's FSDP2; with Forebay and DeepSpeed
the weights that compute sees and their gradients are bfloat16.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LR = 1e-3
INITIAL_STD = 0.02
ROTATION_BASE = 10000.0


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return functional.rms_norm(x, self.weight.shape, self.weight)


def rotated(x):
    """Rotary positions (Su et al., RoFormer, equation 34). x: [batch, heads, seq, width of a head]."""
    seq, half = x.shape[2], x.shape[3] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = torch.arange(seq, device=x.device)[:, None] * ROTATION_BASE**-steps
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = RmsNorm(width), RmsNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        batch, seq, width = x.shape
        split = self.qkv(self.before_attention(x)).view(batch, seq, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """With checkpoints around its layers, as models of this size are trained."""

    def __init__(self, layers, width, heads, hidden, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--who", choices=("compute", "forebay", "offload", "deepspeed"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", required=True, help="LAYERS,WIDTH,HEADS,HIDDEN,VOCAB")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--sequences", default="2", help="of a step: of the first steps, of the next, ...")
    parser.add_argument("--steps", type=int, default=6, help="of each; the first two are not timed")
    parser.add_argument("--format", default="exact", help="of the daemon's states")
    parser.add_argument(
        "--initial", help="a safetensors file: offload writes its first values there, forebay reads them"
    )
    parser.add_argument("--trace", metavar="FILE", help="of torch.profiler: the last step of each size")
    return parser.parse_args()


class DeepSpeed:
    """An engine with the calls of an optimizer."""

    def __init__(self, shape, args):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": args.sequences[0],
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "offload_optimizer": {"device": "cpu", "pin_memory": args.device == "cuda"},
            },
        }
        deepspeed.init_distributed(dist_backend="nccl" if args.device == "cuda" else "gloo")
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Llama(*shape)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    def backward(self, loss):
        self.engine.backward(loss)

    def step(self):
        self.engine.step()

    def zero_grad(self):
        """The engine's step has done it."""


def prepare(args, shape):
    """The model, and what steps it: None for compute alone."""
    torch.manual_seed(1)
    if args.who == "compute":
        with torch.device(args.device):
            torch.set_default_dtype(torch.bfloat16)
            model = Llama(*shape)
            torch.set_default_dtype(torch.float32)
        return model, None
    if args.who == "deepspeed":
        opt = DeepSpeed(shape, args)
        return opt.engine, opt
    sharding = {
        "mesh": init_device_mesh(args.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
        ),
    }
    if args.who == "offload" and args.device == "cuda":
        sharding["offload_policy"] = CPUOffloadPolicy()
    with torch.device("meta"):
        model = Llama(*shape)
    # Embedding and head are groups of their own. FSDP2 gathers the root group first and reduces it last.
    for module in (model.embedding, *model.layers, model.head):
        fully_shard(module, **sharding)
    fully_shard(model, **sharding)
    if args.who == "forebay":
        import forebay

        optimizer = forebay.AdamW(lr=LR, format=args.format)
        largest = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers)
        opt = forebay.attach(
            model, optimizer, memory=forebay.Memory(prefetch_bytes=2 * 2 * largest), initial=args.initial
        )
        return model, opt
    model.to_empty(device="cpu")
    fill(model, args)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def fill(model, args):
    """Sets the shards of a single rank, which are whole parameters; the device makes them: the
    processor would take minutes."""
    values = {name: parameter.detach().to_local() for name, parameter in model.named_parameters()}
    for value in values.values():
        if value.dim() == 1:
            value.fill_(1)
        else:
            random = torch.empty(value.shape, device=args.device).normal_(std=INITIAL_STD)
            value.copy_(random)
    if args.initial:
        from safetensors.torch import save_file

        save_file(values, args.initial)


def params_of(model):
    """Also where a parameter's storage is DeepSpeed's."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def train(args, sequences, model, opt, vocabulary):
    """Figures of some steps of one size."""
    is_cuda = args.device == "cuda"
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(vocabulary, (sequences, args.seq + 1), generator=generator)
    tokens = tokens.to(args.device)  # all steps use these tokens: the loss has to fall
    losses, step_s, parts = [], [], []
    for number in range(args.steps):
        if args.trace and number == args.steps - 1:
            profiler = torch.profiler.profile()
            profiler.start()
        began = time.monotonic()
        loss = loss_of(model, tokens)
        forward = time.monotonic()
        if args.who == "deepspeed":
            opt.backward(loss)
        else:
            loss.backward()
        backward = time.monotonic()
        if opt is None:
            model.zero_grad(set_to_none=True)
        else:
            opt.step()
            opt.zero_grad()
        stepped = time.monotonic()
        losses.append(loss.item())
        if is_cuda:
            torch.cuda.synchronize()
        step_s.append(time.monotonic() - began)
        parts.append([forward - began, backward - forward, stepped - backward])
    if args.trace:
        profiler.stop()
        profiler.export_chrome_trace(f"{args.trace}.{sequences}.json.gz")
    timed = step_s[2:] or step_s[-1:]
    figures = {
        "who": args.who,
        "format": args.format if args.who == "forebay" else None,
        "params": params_of(model),
        "tokens": sequences * args.seq,
        "losses": losses,
        "step_s": step_s,
        "median_s": statistics.median(timed),
        "tokens_per_s": sequences * args.seq / statistics.median(timed),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "until_forward_backward_step_returned_s": parts,  # on the CPU, which runs ahead of the GPU
    }
    if args.who == "forebay":
        figures["stats"] = {name: value for name, value in opt.stats().items() if isinstance(value, (int, float))}
    return figures


def main():
    args = parse_args()
    args.sequences = [int(part) for part in args.sequences.split(",")]
    if args.device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        distributed.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        shape = [int(part) for part in args.shape.split(",")]
        began = time.monotonic()
        model, opt = prepare(args, shape)
        prepared_s = time.monotonic() - began
        for sequences in args.sequences:
            figures = train(args, sequences, model, opt, shape[-1])
            print(json.dumps({**figures, "prepared_s": prepared_s}), flush=True)
        if args.who == "forebay":
            opt.detach()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

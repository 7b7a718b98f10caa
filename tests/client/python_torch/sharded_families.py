# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face, from configurations of a few thousand parameters, and layers that torch.compile has
compiled: sharded attachments of them train as torch's FSDP2 with torch's AdamW does. Started by hand, not
by a test run: transformers is no requirement of these tests, and compiling takes its time.

usage: sharded_families.py [CASE...]      needs transformers 5; no CASE: all, on 2 and on 3 ranks

FOREBAY_BIN_DIR, FOREBAY_CORE   as of the tests (daemon_process.py)
COMPILE_BACKEND                 of torch.compile; default aot_eager, inductor needs a C++ compiler

Prints a line for each case and number of ranks, and why it failed; exits with 1 if one did.
"""

import json
import os
import subprocess
import sys
import tempfile

from daemon_process import Daemon, missing
from test_processes import environment

SIZES = (2, 3)
DEADLINE_S = 900


def start():
    """Runs the cases on a daemon of their own; returns whether all passed."""
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(folder)
        os.environ["FOREBAY_SOCKET"] = daemon.socket
        command = [sys.executable, __file__, "--launch", *sys.argv[1:]]
        values = {**environment(), "FOREBAY_RUN": "families", "TOKENIZERS_PARALLELISM": "false"}
        values["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
        done = subprocess.run(
            command, env=values, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
        daemon.stop()
    failed = done.returncode != 0
    for launch, name, rank, error in map(json.loads, done.stdout.splitlines()):
        failed |= error is not None
        if error or rank == 0:
            print(f"{launch} {name}:", error and f"rank {rank}: {error}" or "passed")
    return not failed


if __name__ == "__main__" and sys.argv[1:2] != ["--launch"]:
    sys.exit(missing() or not start())

# ------------------------------------------------------------------------------ within the processes

import forebay  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from models import CheckpointedNet, loss_of  # noqa: E402
from sharded_ranks import CASES, Twins, case, run_launch, small_net  # noqa: E402

BACKEND = os.environ.get("COMPILE_BACKEND", "aot_eager")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}


def language_loss(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


class Families(Twins):
    """Of a causal language model, sharded layer by layer."""

    def __init__(self, ranks, kind, change=None, **options):
        self.ranks, self.loss, self.loss_bound, self.first = ranks, language_loss, 1e-5, 1
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            model = getattr(transformers, f"{kind}ForCausalLM")(
                getattr(transformers, f"{kind}Config")(**SHAPE, **options)
            )
            model.train()
            if change is not None:
                change(model)
            models.append(ranks.shard(model, model.model.layers))
        self.ours, self.theirs = models


def trains(twins):
    twins.attach().train().assert_close()
    twins.opt.detach()


@case(*SIZES)
def llama(ranks):
    trains(Families(ranks, "Llama"))


@case(*SIZES)
def llama_with_tied_embeddings(ranks):
    twins = Families(ranks, "Llama", tie_word_embeddings=True)
    assert twins.ours.lm_head.weight is twins.ours.model.embed_tokens.weight
    trains(twins)


@case(*SIZES)
def llama_that_attach_shards(ranks):
    """mode="sharded" of the plain model finds its layers."""
    twins = Families(ranks, "Llama")
    torch.manual_seed(1)
    twins.ours = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).train()
    twins.attach(mode="sharded", sharding=forebay.Sharding(mesh=ranks.mesh))
    assert type(twins.ours.model.layers[1]).__name__ == "FSDPLlamaDecoderLayer"
    twins.train().assert_close()
    twins.opt.detach()


@case(*SIZES)
def llama_with_gradient_checkpointing(ranks):
    for reentrant in (True, False):

        def change(model, reentrant=reentrant):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})

        twins = Families(ranks, "Llama", change)
        twins.attach(job=f"{ranks.job}.{reentrant}").train().assert_close()
        twins.opt.detach()


@case(*SIZES)
def mixture_of_experts(ranks):
    """Four experts, which three ranks do not divide; their router's loss is a part of the loss."""
    twins = Families(ranks, "Mixtral", num_local_experts=4, **EXPERTS)
    experts = twins.ours.model.layers[0].mlp.experts.gate_up_proj
    assert experts.shape[0] == 4 and experts.to_local().shape[0] < 4
    trains(twins)


@case(*SIZES)
def mixture_of_experts_with_a_shared_expert(ranks):
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    trains(Families(ranks, "Qwen2Moe", num_experts=6, decoder_sparse_step=1, **sizes, **EXPERTS))


def compiled(ranks, make, before):
    """Ours and theirs, layer by layer, before or after fully_shard()."""

    def compile_layers(model):
        for layer in model.layers:
            layer.compile(backend=BACKEND)
        return model

    twins = Twins(ranks, lambda: compile_layers(make()) if before else make())
    if not before:
        compile_layers(twins.ours)
        compile_layers(twins.theirs)
    return twins


def trains_compiled(twins):
    """All layers, attached or not, share one graph."""
    torch._dynamo.reset()
    captured = torch._dynamo.utils.counters["stats"]
    captured.clear()
    trains(twins)
    assert captured["unique_graphs"] > 0, captured


@case(*SIZES)
def layers_compiled_before_fully_shard(ranks):
    trains_compiled(compiled(ranks, small_net, before=True))


@case(*SIZES)
def layers_compiled_after_fully_shard(ranks):
    trains_compiled(compiled(ranks, small_net, before=False))


@case(*SIZES)
def layers_compiled_after_attach(ranks):
    twins = Twins(ranks).attach()
    for model in (twins.ours, twins.theirs):
        for layer in model.layers:
            layer.compile(backend=BACKEND)
    twins.train().assert_close()
    with torch.no_grad():
        ours, theirs = (loss_of(model, ranks.batch(77)).item() for model in (twins.ours, twins.theirs))
    assert abs(ours - theirs) <= 1e-5 * abs(theirs)
    twins.opt.detach()


@case(*SIZES)
def compiled_layers_with_checkpointing(ranks):
    def make():
        torch.manual_seed(1)
        return CheckpointedNet(reentrant=False)

    trains_compiled(compiled(ranks, make, before=False))


@case(*SIZES)
def llama_with_compiled_layers(ranks):
    def change(model):
        for layer in model.model.layers:
            layer.compile(backend=BACKEND)

    trains_compiled(Families(ranks, "Llama", change))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as launches:
        for size in SIZES:
            run_launch(f"ranks{size}", size, sys.argv[2:] or list(CASES), launches)

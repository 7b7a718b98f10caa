# SPDX-License-Identifier: Apache-2.0
"""Ranks that train with Hugging Face's Trainer, an Accelerate loop or peft, with Forebay or without. Begins the ranks
again, once, when one of them was killed, as torchrun does. Writes FOLDER/rank<R>.json, and FOLDER/weights.pt of rank 0.

usage: huggingface_ranks.py SCENARIO RANKS FOLDER OPTIONS      OPTIONS in JSON; see the scenarios
       huggingface_ranks.py script RANKS FILE ARGUMENTS         a script and its arguments, in a JSON list
"""

import doctest
import gc
import inspect
import json
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import warnings

import torch

sys.path.append(str(pathlib.Path(__file__).parents[2] / "support"))
torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # models are created from configs

import accelerate  # noqa: E402, F401
import exact_reference  # noqa: E402
import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import peft  # noqa: E402
import transformers  # noqa: E402
from rendezvous import Rendezvous  # noqa: E402
from forebay import _attach  # noqa: E402, F401
from forebay.integrations import accelerate as forebay_accelerate  # noqa: E402
from forebay.integrations import transformers as forebay_transformers  # noqa: E402

# Modules that a first Trainer or model imports lazily. They are imported here, so that no rank has to import them.
import transformers.models.bert.modeling_bert  # noqa: E402, F401
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401

VOCAB = 61
TIMES = ("runtime", "per_second", "preparation")  # logged values that differ from run to run


def gpt2(seed=1):
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCAB, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert(seed=1):
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": VOCAB}
    config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16)
    return transformers.BertForSequenceClassification(config)


MODELS = {"gpt2": gpt2, "bert": bert}


class Sentences(torch.utils.data.Dataset):
    """Of different lengths: their labels are padded with -100."""

    def __init__(self, count, kind):
        self.count, self.kind = count, kind

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 4 + index % 7
        tokens = torch.randint(1, VOCAB, (12,), generator=generator)
        mask = torch.arange(12) < length
        tokens = tokens.where(mask, 0)
        labels = tokens.where(mask, -100) if self.kind == "gpt2" else tokens[0] % 2
        return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}

    def batch(self):
        return torch.utils.data.default_collate([self[index] for index in range(self.count)])


class Killer(transformers.TrainerCallback):
    """SIGKILL where {"rank", "step", "event"} says: the first such event from that step on."""

    def __init__(self, rank, step, event):
        def die(args, state, control, **_):
            if state.global_step >= step and args.process_index == rank:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(self, event, die)


class Merger(transformers.TrainerCallback):
    """Merges and unmerges in the middle of a training, as a script does that hands weights to a server."""

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % 5 == 0:
            model.merge_adapter()
            model.unmerge_adapter()


def scale(model, factor):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), factor)


def arguments_of(folder, options):
    values = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return transformers.TrainingArguments(os.path.join(folder, "out"), use_cpu=True, **values)


def trainer(rank, attempt, folder, options):
    """What the options are: see test_transformers.py."""
    kind = options.get("model", "gpt2")
    model = MODELS[kind](seed=1 + rank)  # DDP gives all ranks the weights of rank 0
    if options.get("lora"):
        model = with_lora(model, options["lora"])
    kill = options.get("kill")
    killers = [Killer(**kill)] if kill and attempt == 0 else []
    callbacks = killers if options.get("trainers", 1) == 1 else []
    callbacks = callbacks + [Merger()] * options.get("merge_within", False)
    if "patience" in options:
        callbacks.append(transformers.EarlyStoppingCallback(options["patience"]))
    if options.get("by_hand"):
        memory = forebay.Memory(extra_state_bytes=options["by_hand"])
        attached = forebay.attach(model, forebay.AdamW(lr=1e-2), timeout=60, memory=memory)
    given = (attached, None) if options.get("by_hand") else optimizers_of(options.get("optimizer"), model)
    own = {} if options.get("plain") else {"forebay": {"timeout": 60, **options.get("forebay", {})}}
    maker = TRAINERS[options.get("trainer", "plain")][not options.get("plain")]
    one = maker(
        model,
        arguments_of(folder, options.get("arguments", {})),
        train_dataset=Sentences(44, kind),
        eval_dataset=Sentences(10, kind),
        callbacks=callbacks,
        optimizers=given,
        **own,
    )
    outputs = [one.train(resume_from_checkpoint=options.get("resume"))]
    for _ in range(options.get("trainers", 1) - 1):  # further trainers of the same model
        data = {"train_dataset": Sentences(30, kind), "eval_dataset": Sentences(10, kind)}
        one = maker(model, one.args, callbacks=killers, **data, **own)
        outputs.append(one.train())
    for _ in range(options.get("calls", 1) - 1):
        scale(model, options.get("scale", 1.0))
        outputs.append(one.train())
    found = {
        "logged": [without_times(entry) for entry in one.state.log_history],
        "outputs": [[output.global_step, output.training_loss] for output in outputs],
        "evaluated": without_times(one.evaluate()),
    }
    one.save_model(os.path.join(folder, f"saved{rank}"))
    if not options.get("plain") and one.optimizer.optimizer._engine.attachment is not None:
        opt = one.optimizer.optimizer
        found |= {"sha256": opt.state_sha256(), "committed": opt.committed_step}
    if options.get("merge"):
        model = model.merge_and_unload()
    return found, model.to(getattr(torch, options["to"])) if "to" in options else model


class Theirs(transformers.Trainer):
    """A Trainer of another library: a loss of its own, and a number in the log."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, compute_loss_func=summed_loss, **kwargs)

    def log(self, logs, *args):
        super().log({**logs, "theirs": 1.0}, *args)


class TheirsAttached(forebay_transformers.Trainer, Theirs):
    pass


def summed_loss(outputs, labels, num_items_in_batch):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class OwnLoss(torch.nn.Module):
    """A loss with parameters, that holds its model, as those of sentence-transformers."""

    def __init__(self, model):
        super().__init__()
        torch.manual_seed(7)
        self.model, self.classifier = model, torch.nn.Linear(2, 3)

    def forward(self, inputs):
        labels = inputs.pop("labels")
        outputs = self.model(**inputs)
        return torch.nn.functional.cross_entropy(self.classifier(outputs.logits), labels), outputs


class Lossy(transformers.Trainer):
    """Makes its optimizer over the loss and the model in it, as sentence-transformers' Trainer does."""

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.loss = OwnLoss(model)

    def get_optimizer_cls_and_kwargs(self, args, model=None):
        kind, kwargs = super().get_optimizer_cls_and_kwargs(args, self.loss)
        decayed = self.get_decay_parameter_names(self.loss)
        named = list(self.loss.named_parameters())
        kwargs["optimizer_dict"] = [
            {"params": [p for n, p in named if n in decayed], "weight_decay": args.weight_decay},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ]
        return kind, kwargs

    def training_step(self, *args):
        self.loss.classifier.zero_grad()  # Trainer clears the model's gradients alone
        return super().training_step(*args)

    def _clip_grad_norm(self, model):
        return self.accelerator.clip_grad_norm_(self.loss.parameters(), self.args.max_grad_norm)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = self.loss(dict(inputs))
        return (loss, outputs) if return_outputs else loss


class LossyAttached(forebay_transformers.Trainer, Lossy):
    pass


class Narrow(transformers.Trainer):
    """Memory for batches of three alone, from the third step on."""

    def training_step(self, model, inputs, *args):
        if self.state.global_step >= 2 and len(inputs["input_ids"]) > 3:
            super().training_step(model, inputs, *args)  # delivers gradients before the error
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().training_step(model, inputs, *args)


class NarrowAttached(forebay_transformers.Trainer, Narrow):
    pass


TRAINERS = {
    "plain": (transformers.Trainer, forebay_transformers.Trainer),
    "theirs": (Theirs, TheirsAttached),
    "lossy": (Lossy, LossyAttached),
    "narrow": (Narrow, NarrowAttached),
}


class ExactAdamW(torch.optim.Optimizer):
    """AdamW of float32 parameters with the roundings of the daemon's, for comparisons to the bit."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            scalars = exact_reference.Scalars(group["lr"], group["step"], 1, group["weight_decay"])
            for param in group["params"]:
                zero = torch.zeros_like(param)
                m, v = self.state.get(param, (zero, zero))
                new, *self.state[param] = exact_reference.update(scalars, param.grad, param.detach(), m, v)
                param.detach().copy_(new)


def optimizers_of(kind, model):
    """What a script makes itself: an optimizer of torch with a scheduler, or one of Forebay's."""
    if kind == "exact":
        trained = [param for param in model.parameters() if param.requires_grad]
        return ExactAdamW(trained, {"lr": 1e-2, "weight_decay": 0.1}), None
    if kind == "torch":
        decayed = [{"params": list(model.parameters()), "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(decayed, lr=1e-2, betas=(0.8, 0.99))
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    return forebay.Lion(lr=1e-3) if kind == "lion" else None, None


def without_times(entry):
    return {name: value for name, value in entry.items() if not any(time in name for time in TIMES)}


def with_lora(model, dtype):
    """A frozen base of the type with adapters of float32, as peft makes them."""
    base = model.to(getattr(torch, dtype))
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config)


def loop(rank, attempt, folder, options):
    """A loop as Accelerate's documentation has it. plain, accumulate, by_hand, steps: see test_accelerate.py."""
    maker = accelerate.Accelerator if options.get("plain") else forebay_accelerate.Accelerator
    count = options.get("accumulate", 1)
    accelerator = maker(cpu=True, gradient_accumulation_steps=count)
    # prepare() gives all ranks the weights of rank 0.
    model = gpt2(seed=1 if options.get("by_hand") else 1 + rank)
    torch.manual_seed(5 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    loader = torch.utils.data.DataLoader(Sentences(32, "gpt2"), batch_size=4, shuffle=True)
    if options.get("by_hand"):
        optimizer = forebay.attach(model, forebay.AdamW(lr=1e-2))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms, rates = [], [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            rates.append(scheduler.get_last_lr()[0])
    unwrapped = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        unwrapped.save_pretrained(os.path.join(folder, "saved0"))
    accelerator.wait_for_everyone()
    found = {"losses": losses, "norms": norms, "rates": rates, "wrapped": type(model).__name__}
    if not options.get("plain"):
        found |= {"sha256": optimizer.optimizer.state_sha256(), "committed": optimizer.optimizer.committed_step}
    return found, unwrapped


def several(rank, attempt, folder, options):
    """Two models and a loss that is not passed to prepare(), under one optimizer and one norm."""
    maker = accelerate.Accelerator if options.get("plain") else forebay_accelerate.Accelerator
    accelerator = maker(cpu=True)
    torch.manual_seed(1)
    vision = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8))
    text, loss = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.nn.Linear(8, 1)
    both = torch.nn.ModuleList([vision, text] + [loss] * options["loss"])
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-2)
    given = forebay.AdamW(lr=1e-2) if options.get("ours") else optimizer
    first, second, optimizer = accelerator.prepare(vision, text, given)
    rows = torch.Generator().manual_seed(4 + rank)
    losses, norms = [], []
    for _ in range(8):
        x = torch.randn(4, 8, generator=rows)
        y = first(second(x)) - x.sin()
        value = (loss(y) if options["loss"] else y).square().mean()
        accelerator.backward(value)
        norms.append(accelerator.clip_grad_norm_(both.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(value.detach()).mean().item())
    found = {"losses": losses, "norms": norms}
    if not options.get("plain"):
        opt = optimizer.optimizer
        found["named"] = [sorted(opt.read_state(name)) for name in ("0.0.weight", "1.0.bias")]
        found["buffers"] = [name for name, _ in opt._buffers.named()]
    return found, both


def refused(rank, attempt, folder, options):
    """The ids and texts of what is refused. See test_transformers.py."""
    found = {}

    def expect(name, work):
        try:
            work()
        except forebay.ForebayError as error:
            found[name] = str(error)
        else:
            found[name] = None

    def make(job, **more):
        values = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", **more.pop("arguments", {})}
        data = {"train_dataset": Sentences(8, "gpt2"), "forebay": {"job": job, "timeout": 60}}
        return forebay_transformers.Trainer(
            None if "model_init" in more else more.pop("model", None) or gpt2(), arguments_of(folder, values), **data, **more
        )

    first = make("first")
    first.train()
    expect("resume after train", lambda: first.train(resume_from_checkpoint=os.path.join(folder, "out")))
    del first
    expect("another Trainer", make("first").train)
    model = gpt2()
    model.register_buffer("table", torch.zeros(1).expand(130_000_000))
    expect("large buffers", make("large", model=model).train)
    expect("adafactor", make("second", arguments={"optim": "adafactor"}).train)
    opt = forebay.attach(gpt2(), forebay.AdamW(), job="loop", timeout=60, memory=forebay.Memory(extra_state_bytes=256 << 10))
    opt.step(extra_state=b"epoch 3")
    opt.detach()
    opt = forebay.attach(model := gpt2(), forebay.AdamW(), job="by-hand", memory=forebay.Memory(extra_state_bytes=1 << 20))
    for name in ("optimizer of a script", "an optimizer of another Trainer"):
        expect(name, make("other", model=model, optimizers=(opt, None)).train)
    opt.detach()
    model = gpt2()
    first = make("of-two", model=model)
    first.train()
    make("of-two.2", model=model).train()
    expect("train of the first", first.train)
    expect("a job of a loop", make("loop", optimizers=(forebay.AdamW(), None)).train)
    again = make("third", model_init=lambda: gpt2())
    again.train()
    expect("model_init again", again.train)
    del forebay_transformers.transformers.Trainer._run_epoch
    expect("another transformers", lambda: make("fourth"))
    own = forebay_accelerate.Accelerator(cpu=True)
    expect("no model", lambda: own.prepare(torch.optim.AdamW(gpt2().parameters())))
    # The call that the error's text recommends.
    own.prepare(model := gpt2(), torch.optim.AdamW(model.parameters()))
    own = forebay_accelerate.Accelerator(cpu=True)
    pairs = [(one, torch.optim.AdamW(one.parameters())) for one in (gpt2(), gpt2())]
    expect("two pairs", lambda: own.prepare(*pairs[0], *pairs[1]))
    expect("no rule", lambda: own.prepare(model := gpt2(), torch.optim.RMSprop(model.parameters())))
    model, other = gpt2(), gpt2()
    own = forebay_accelerate.Accelerator(cpu=True, forebay={"job": "fifth", "timeout": 60})
    own.prepare(model, torch.optim.AdamW(model.parameters()))
    expect("second model", lambda: own.prepare(other, torch.optim.AdamW(other.parameters())))
    # The code that the error's text recommends:
    other, optimizer = own.prepare(other, forebay.attach(other, forebay.AdamW(), job="sixth", timeout=60))
    own.backward(other(**Sentences(2, "gpt2").batch()).loss + model(**Sentences(2, "gpt2").batch()).loss)
    optimizer.step()
    found["two models"] = optimizer.optimizer.committed_step
    expect("load_state", lambda: own.load_state(own.save_state(folder)))
    expect("half", other.half)
    optimizer.optimizer.detach()  # the call that the error's text recommends
    other.half()
    return found, None


def examples(rank, attempt, folder, options):
    """Runs those of the public classes and methods; finds what has none."""
    found = {}
    for kind in (forebay_accelerate.Accelerator, forebay_transformers.Trainer, forebay_transformers.Seq2SeqTrainer):
        things = {kind.__name__: kind}
        for name, thing in vars(kind).items():
            if inspect.isfunction(thing) and not name.startswith("_"):
                things[f"{kind.__name__}.{name}"] = thing
        for name, thing in things.items():
            os.environ["FOREBAY_JOB"] = name
            names = {"model": torch.nn.Linear(4, 2), "inputs": torch.randn(3, 4), "folder": folder}
            names |= {"forebay": forebay, "torch": torch, "transformers": transformers}
            example = doctest.DocTestParser().get_doctest(thing.__doc__, names, name, None, None)
            found[name] = [len(example.examples), doctest.DocTestRunner().run(example).failed]
    return found, None


SCENARIOS = {"trainer": trainer, "loop": loop, "several": several, "refused": refused, "examples": examples}


def run_rank(rank, attempt, scenario, ranks, meeting, folder, options):
    if ranks > 1:
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in launch.items()} | meeting)
    forked_ranks.make_pool()
    warnings.simplefilter("ignore")
    if scenario == "script":
        sys.argv = [folder, *options]
        runpy.run_path(folder, run_name="__main__")
        return
    found, model = SCENARIOS[scenario](rank, attempt, folder, options)
    pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(found | {"attempt": attempt}))
    if rank == 0 and model is not None:
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        torch.save(state, os.path.join(folder, "weights.pt"))


def launch(attempt, scenario, ranks, *arguments):
    """The exit statuses of the ranks. Once a rank has failed, each remaining rank is killed."""
    rendezvous = Rendezvous()
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=run_rank, args=(rank, attempt, scenario, ranks, rendezvous.environment(), *arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        for sentinel in multiprocessing.connection.wait(list(waiting)):
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                for other in waiting.values():
                    other.kill()
    return [process.exitcode for process in processes]


def prepare():
    """Work that every run would repeat: a first save compiles expressions for all architectures, and the collections of
    Trainer look at all that was imported."""
    with tempfile.TemporaryDirectory() as folder:
        gpt2().save_pretrained(folder)
    gc.collect()
    gc.freeze()


prepare()


def main(arguments):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    scenario, ranks, folder, options = *arguments[:3], json.loads(arguments[3])
    for attempt in (0, 1):
        statuses = launch(attempt, scenario, int(ranks), folder, options)
        if -signal.SIGKILL not in statuses or not (scenario != "script" and options.get("kill")):
            break
    if any(statuses):
        sys.exit(f"ranks ended with {statuses}")


if __name__ == "__main__":
    main(sys.argv[1:])

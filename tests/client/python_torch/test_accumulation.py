# SPDX-License-Identifier: Apache-2.0
# Goal    With shared attachment a step takes as many backwards as torch does. Their gradients are added in the order of the
#         backwards: on one rank with torch's own bits, on several ranks as the sum over the backwards and the mean over the
#         ranks, in an order that does not depend on timing. What cannot be added is refused by name. If a process dies between
#         the backwards, the whole step is repeated.
# Method  The same training with torch's optimizers over a private twin. Losses that are linear in a parameter that begins as
#         zeros, and SGD with a learning rate of 1, show the bits of a sum. Two ranks are two threads, as in test_two_ranks.py.

import os
import signal

import forebay
import forked_ranks
import pytest
import torch
from daemon_process import Daemon, missing
from models import CheckpointedNet, TwiceNet, assert_close, batch, loss_of, net, pair, scaled_step
from test_attempts import moe
from test_clipping import assert_same_norm
from test_daemon_restart import Service
from test_two_ranks import attach_both, both
from torch import nn

PASSES = 3


def train_passes(model, opt, steps, passes=PASSES, loss=loss_of, first=0, rank=0):
    for step in range(first, first + steps):
        for number in range(passes):
            (loss(model, batch(100 * step + 10 * number + rank)) / passes).backward()
        opt.step()
        opt.zero_grad()


def compare(model, steps=4, **options):
    model, plain, plain_opt = pair(model)
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train_passes(model, opt, steps, **options)
    train_passes(plain, plain_opt, steps, **options)
    assert_close(model, plain, steps)
    assert opt.committed_step == steps
    assert all(group.lease is None for group in opt._engine.groups)
    return opt


class Linear(nn.Module):
    """Losses that are linear in its parameters, which begin as zeros: gradients are what is asked for."""

    def __init__(self, names="ab", elems=9000, dtype=torch.float32):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(elems, dtype=dtype)))

    def backward(self, seed, names=None):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            factors = torch.randn(parameter.shape, generator=generator) * 10.0 ** (seed % 5)
            if names is None or name in names:
                (parameter * factors.to(parameter.dtype)).sum().backward()


# ------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("passes", [2, 5])
def test_a_step_of_several_backwards(node, passes):
    compare(net(), passes=passes)


def test_the_sum_has_torchs_bits(node):
    model, plain = Linear(), Linear()
    opt = forebay.attach(model, forebay.SGD(lr=1.0))
    plain_opt = torch.optim.SGD(plain.parameters(), lr=1.0)
    for module, optimizer in ((model, opt), (plain, plain_opt)):
        for seed in range(7):
            module.backward(seed, "ab" if seed % 3 else "b")
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(ours, theirs) and theirs.abs().max() > 1e4


def test_one_gradient_a_parameter_needs_no_pass(node, monkeypatch):
    """Backwards that share no parameter are one pass."""
    model = Linear()
    opt = forebay.attach(model, forebay.SGD(lr=1.0))
    begun = []
    monkeypatch.setattr(opt._engine, "attachment", Counting(opt._engine.attachment, begun))
    model.backward(1, "a")
    model.backward(2, "b")
    assert begun == []
    model.backward(3, "a")
    model.backward(4, "b")
    assert begun == [1]
    model.backward(5, "b")
    assert begun == [1, 2]
    opt.step()


class Counting:
    """An attachment, and how many passes it has begun."""

    def __init__(self, attachment, begun):
        self._attachment, self._begun = attachment, begun

    def __getattr__(self, name):
        return getattr(self._attachment, name)

    def begin_pass(self):
        self._begun.append(len(self._begun) + 1)
        self._attachment.begin_pass()


class TwiceCheckpointed(CheckpointedNet):
    """Each use of a layer is a backward of its own within the backward, where checkpoints are reentrant."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in [*self.layers, *self.layers]:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_layers_used_twice_and_checkpointed(node, reentrant):
    torch.manual_seed(4)
    compare(TwiceNet() if reentrant is None else TwiceCheckpointed(reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(node, reentrant):
    torch.manual_seed(3)
    compare(CheckpointedNet(reentrant))


def test_experts_that_have_a_gradient_in_some_passes(node):
    model, plain, plain_opt = pair(moe())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for module, optimizer in ((model, opt), (plain, plain_opt)):
        for step in range(3):
            for used in ((0, 3), (3, 4), (step, 0), (5, 1)):
                logits = module(batch(10 * step + used[0]), used)
                (logits.square().mean() / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, plain, 3)


def compare_steps(backwards):
    """Of a model attached and in plain torch, by the backwards that `backwards` makes of a step."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for module, optimizer in ((model, opt), (plain, plain_opt)):
        for step in range(3):
            backwards(module, batch(step))
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, plain, 3)


def test_a_second_backward_over_a_retained_graph(node):
    def backwards(module, tokens):
        loss = loss_of(module, tokens)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward(retain_graph=True)
        loss.backward()

    compare_steps(backwards)


def test_two_losses_of_one_forward(node):
    def backwards(module, tokens):
        logits = module(tokens)
        logits.square().mean().backward(retain_graph=True)
        logits.float().logsumexp(-1).mean().backward()

    compare_steps(backwards)


def test_what_is_added_to_a_gradient_by_hand(node):
    """As weight decay was written once."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for module, optimizer in ((model, opt), (plain, plain_opt)):
        loss_of(module, batch(0)).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.grad.add_(0.1 * parameter)
        loss_of(module, batch(1)).backward()
        optimizer.step()
    assert_close(model, plain, 1)
    loss_of(model, batch(2)).backward()
    with pytest.raises(forebay.UsageError, match="add_.*on the gradient of parameter"):
        model.norm.weight.grad.add_(model.norm.weight.detach(), alpha=0.1)
    opt.step()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x):
        return self.layers(x)


def gan_steps(generator, critic, generator_opt, critic_opt, steps):
    """As in PyTorch's DCGAN tutorial: two backwards for the critic, and one through it for the generator."""
    loss = nn.BCEWithLogitsLoss()
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        real, noise = torch.randn(8, 6, generator=random), torch.randn(8, 4, generator=random)
        critic_opt.zero_grad()
        loss(critic(real), torch.ones(8, 1)).backward()
        fake = generator(noise)
        loss(critic(fake.detach()), torch.zeros(8, 1)).backward()
        critic_opt.step()
        generator_opt.zero_grad()
        loss(critic(fake), torch.ones(8, 1)).backward()
        generator_opt.step()


def test_a_generator_and_its_critic(node):
    """What the generator's backward leaves at the critic goes with the critic's next zero_grad()."""
    torch.manual_seed(5)
    models = Generator(), nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    pairs = [pair(model) for model in models]
    opts = [
        forebay.attach(model, forebay.AdamW(lr=1e-2), job=f"{os.environ['FOREBAY_JOB']}.{name}")
        for name, model in zip("GD", models)
    ]
    gan_steps(*models, *opts, 4)
    gan_steps(*(plain for _, plain, _ in pairs), *(plain_opt for *_, plain_opt in pairs), 4)
    for model, plain, _ in pairs:
        assert_close(model, plain, 4)
    assert [opt.committed_step for opt in opts] == [4, 4]


# ---------------------------------------------------------------------------- between backward and step


def test_norms_and_clipping_are_of_all_passes(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(4):
        for number in range(PASSES):
            for module in (model, plain):
                loss_of(module, batch(10 * step + number)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert_same_norm(ours.grad.norm(), theirs.grad.norm())
        for module, optimizer in ((model, opt), (plain, plain_opt)):
            nn.utils.clip_grad_norm_(module.parameters(), 0.1 if step % 2 else 1e6)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, plain, 4)


def test_max_grad_norm_is_of_all_passes(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2, max_grad_norm=0.1))
    for step in range(3):
        for module in (model, plain):
            for number in range(PASSES):
                loss_of(module, batch(10 * step + number)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for optimizer in (opt, plain_opt):
            optimizer.step()
            optimizer.zero_grad()
        assert abs(opt.grad_norm - norm.item()) <= 1e-3 * norm.item()
    assert_close(model, plain, 3)


def test_a_grad_scaler(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for module, optimizer in ((model, opt), (plain, plain_opt)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch(10 * step))).backward()
            scaler.scale(loss_of(module, batch(10 * step + 1))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaled_step(module, optimizer, scaler, loss_of(module, batch(99))) == 2.0**8
    assert_close(model, plain, 4)


def test_what_cannot_be_added_is_refused_before_anything_is_brought(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))

    def scale(module):
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)

    def clip(module):
        nn.utils.clip_grad_norm_(module.parameters(), 1e6)

    cases = [(scale, "scaled or clamped"), (clip, "a norm was asked for")]
    for step, (edit, what) in enumerate(cases):
        for module in (model, plain):
            loss_of(module, batch(step)).backward()
            edit(module)
        with pytest.raises(forebay.UsageError, match=f"second gradient after .*{what}") as info:
            loss_of(model, batch(50)).backward()
        assert info.value.code == "E_UNSUPPORTED"
        assert "after the last backward of a step; opt.zero_grad()" in info.value.hint
        for optimizer in (opt, plain_opt):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, plain, 2)


# --------------------------------------------------------------------------------------- what is dropped


@pytest.mark.parametrize("clear", ["opt", "model"])
def test_zero_grad_drops_all_passes(node, clear):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(3):
        for number in range(2):
            loss_of(model, batch(70 + number)).backward()
        (opt if clear == "opt" else model).zero_grad()
        assert clear == "model" or opt.delivered_groups == 0
        train_passes(model, opt, 1, first=step)
        train_passes(plain, plain_opt, 1, first=step)
    assert_close(model, plain, 3)


def test_a_further_backward_that_fails_ends_the_whole_attempt(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    loss_of(model, batch(70)).backward()
    handle = model.layers[0].up.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(71)).backward()
    handle.remove()
    with pytest.raises(forebay.UsageError, match="did not come to its end") as info:
        opt.step()
    assert info.value.code == "E_GRAD_PARTIAL"
    train_passes(model, opt, 2)  # begins the step from scratch
    train_passes(plain, plain_opt, 2)
    assert_close(model, plain, 2)


def test_a_further_gradient_that_is_not_finite_refuses_the_step(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    loss_of(model, batch(70)).backward()
    (loss_of(model, batch(71)) * float("nan")).backward()
    with pytest.raises(forebay.ForebayError, match="E_NONFINITE"):
        opt.step()
    train_passes(model, opt, 2)
    train_passes(plain, plain_opt, 2)
    assert_close(model, plain, 2)


# ------------------------------------------------------------------------------------------ several ranks


def test_two_ranks_with_different_numbers_of_passes(node):
    """The sum over each rank's passes, and the mean over the ranks: what DDP gives after no_sync()."""
    models = [net(), net()]
    opts = attach_both(models)
    plain = net()
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    passes = [(1, 3), (2, 1), (3, 3), (4, 2)]

    def run(rank):
        for step, numbers in enumerate(passes):
            train_passes(models[rank], opts[rank], 1, numbers[rank], first=step, rank=rank)

    both(run)
    for step, numbers in enumerate(passes):
        for rank in (0, 1):
            for number in range(numbers[rank]):
                value = loss_of(plain, batch(100 * step + 10 * number + rank))
                (value / numbers[rank] / 2).backward()
        plain_opt.step()
        plain_opt.zero_grad()
    for model in models:
        assert_close(model, plain, len(passes))
    assert opts[0].state_sha256() == opts[1].state_sha256()


@pytest.mark.parametrize("slow", [0, 1])
def test_the_order_of_addition_is_that_of_passes_then_ranks(node, slow):
    """Whoever is first: rank `slow` begins when the other has delivered all."""
    models = [Linear(), Linear()]
    opts = both(lambda rank: attach_sgd(models[rank], rank))
    for rank in (1 - slow, slow):
        for number in range(PASSES):
            models[rank].backward(10 * number + rank)
    both(lambda rank: opts[rank].step())
    for name in "ab":
        total = torch.zeros(9000)
        for number in range(PASSES):
            for rank in (0, 1):
                total += gradient_of(name, 10 * number + rank)
        assert torch.equal(models[0].get_parameter(name), -(total / 2)), name


def attach_sgd(model, rank):
    options = {"rank": rank, "world_size": 2, "timeout": 30}
    return forebay.attach(model, forebay.SGD(lr=1.0), **options)


def gradient_of(name, seed):
    twin = Linear()
    twin.backward(seed)
    return twin.get_parameter(name).grad


def test_a_rank_that_drops_its_second_pass_begins_the_step_anew_for_all(node):
    models = [net(), net()]
    opts = attach_both(models)
    for rank in (0, 1):
        for number in range(2):
            loss_of(models[rank], batch(70 + number)).backward()
    opts[0].zero_grad()
    plain = net()
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def run(rank):
        if rank == 0:
            train_passes(models[rank], opts[rank], 1, rank=rank)
            return
        with pytest.raises(forebay.ForebayError, match="E_GRAD_DROPPED"):
            opts[rank].step()
        train_passes(models[rank], opts[rank], 1, rank=rank)

    both(run)
    for rank in (0, 1):
        for number in range(PASSES):
            (loss_of(plain, batch(10 * number + rank)) / PASSES / 2).backward()
    plain_opt.step()
    assert_close(models[0], plain, 1)


def test_two_ranks_clip_by_the_norm_of_all_passes(node):
    models = [net(), net()]
    opts = attach_both(models)
    plain = net()
    for rank in (0, 1):
        for number in range(2):
            (loss_of(plain, batch(10 * number + rank)) / 2).backward()

    def run(rank):
        for number in range(2):
            loss_of(models[rank], batch(10 * number + rank)).backward()
        norm = nn.utils.clip_grad_norm_(models[rank].parameters(), 1e-2)
        with pytest.raises(forebay.UsageError, match="a norm was asked for"):
            loss_of(models[rank], batch(3)).backward()
        opts[rank].step()
        return norm

    norms = both(run)
    assert torch.equal(*norms)
    assert_same_norm(norms[0], nn.utils.clip_grad_norm_(plain.parameters(), 1e6))
    assert [opt.committed_step for opt in opts] == [1, 1]


# ------------------------------------------------------------------------------------------- 16-bit formats


@pytest.mark.parametrize("format_", ["exact", "bf16", "int8"])
def test_announced_or_not_sums_of_16_bit_gradients_have_the_same_bits(node, format_):
    digests, sums = set(), []
    for accumulate in (PASSES, 1):
        model = net().to(torch.bfloat16)
        job = f"{os.environ['FOREBAY_JOB'][-40:]}.{accumulate}"
        optimizer = forebay.AdamW(lr=1e-2, format=format_)
        opt = forebay.attach(model, optimizer, job=job, accumulate=accumulate)
        sums.append([sums_of(job)])
        for step, passes in enumerate((1, PASSES, 1, 2)):
            train_passes(model, opt, 1, passes, first=step)
            sums[-1].append(sums_of(job))
        digests.add(opt.state_sha256())
        opt.detach()
    assert len(digests) == 1
    announced, unannounced = sums
    assert len(set(announced)) == 1, "from attach on"
    assert len(set(unannounced[:2])) == 1 and len(set(unannounced[2:])) == 1
    assert unannounced[2] > unannounced[1]


def sums_of(job):
    return sum(
        arena["size_bytes"]
        for arena in forebay.status()["memory"]["arenas"]
        if (arena["job"], arena["kind"]) == (job, "step")
    )


def test_a_sum_of_16_bit_gradients_is_rounded_nowhere(node):
    """In bfloat16 torch loses a small addend beside a large one; the daemon adds in float32."""
    model = Linear("a", elems=5000, dtype=torch.bfloat16)
    opt = forebay.attach(model, forebay.SGD(lr=1.0))
    want = torch.zeros(5000)
    for number in range(64):
        factor = 1.0 if number == 0 else 2.0**-10
        (model.a * torch.full((5000,), factor, dtype=torch.bfloat16)).sum().backward()
        want -= factor
    opt.step()
    assert torch.equal(opt.read_state("a")["master"], want) and want[0] != -1.0


@pytest.mark.skipif(bool(missing()), reason=missing() or "")
def test_no_room_for_the_sums_of_unannounced_passes(folder, monkeypatch):
    """A page more than the job takes: the first second pass is refused with what to write, which then works."""

    def attach(socket, **options):
        torch.manual_seed(1)
        model = Linear("a", elems=1 << 20, dtype=torch.bfloat16)
        return model, forebay.attach(model, forebay.SGD(lr=1.0), socket=socket, timeout=60, **options)

    swap = ("swap.capacity=64MiB", f"swap.paths={folder}", "swap.staging=2MiB", "update.block_elems=65536")
    roomy = Daemon(folder, *swap)
    _, opt = attach(roomy.socket)
    used = forebay.status(roomy.socket)["memory"]["used_bytes"]
    opt.detach()
    roomy.stop()
    os.unlink(roomy.socket) if os.path.exists(roomy.socket) else None
    tight = Daemon(folder, *swap, f"dram.limit={used + (1 << 20)}")
    model, opt = attach(tight.socket)
    model.backward(1)
    model.backward(2)
    with pytest.raises(forebay.ForebayError) as info:
        opt.step()
    assert info.value.code == "E_DRAM_LIMIT" and "needs sums in float32" in str(info.value)
    assert "attach with accumulate" in info.value.hint and "call step after each" in info.value.hint
    model.backward(1)
    opt.step()  # a step of one pass still works
    opt.detach()
    model, opt = attach(tight.socket, accumulate=2)  # the job's states give room
    assert opt.committed_step == 1
    model.backward(1)
    model.backward(2)
    opt.step()
    assert opt.committed_step == 2
    opt.detach()
    tight.stop()


# ------------------------------------------------------------------------------------------- who dies


def test_a_trainer_that_is_killed_in_its_second_pass(node):
    def trainer():
        model = net()
        opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
        train_passes(model, opt, 2)
        loss_of(model, batch(200)).backward()
        die = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        model.layers[0].up.weight.register_hook(die)
        loss_of(model, batch(210)).backward()

    pid = os.fork()
    if pid == 0:
        forked_ranks.make_pool()
        try:
            trainer()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    model, plain, plain_opt = pair(net(seed=1))
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    assert opt.committed_step == 2
    train_passes(model, opt, 2, first=2)
    train_passes(plain, plain_opt, 4)
    assert_close(model, plain, 4)


@pytest.mark.skipif(bool(missing()), reason=missing() or "")
def test_a_daemon_that_is_killed_has_lost_the_passes(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        model, plain, plain_opt = pair(net())
        opt = forebay.attach(model, forebay.AdamW(lr=1e-2), socket=f"{folder}/s", timeout=60)
        train_passes(model, opt, 1)
        for number in range(2):
            loss_of(model, batch(70 + number)).backward()
        manager.kill()
        with pytest.raises(forebay.ForebayError, match="E_GRAD_DROPPED"):
            opt.step()
        train_passes(model, opt, 2, first=1)
        train_passes(plain, plain_opt, 3)
        assert_close(model, plain, 3)
        opt.detach()

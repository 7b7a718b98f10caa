# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: what forwards keep for their backwards, in the daemon's memory."""

import contextlib
import functools
import threading

import torch
import forebay
from forebay import _activations
from models import CheckpointedNet, loss_of
from sharded_ranks import case, full, refused, small_net
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

ROOM = 4 << 20
STEPS = 4


@contextlib.contextmanager
def tensors_of_any_size():
    """The models of these tests are small."""
    before, _activations.LEAST_BYTES = _activations.LEAST_BYTES, 1
    try:
        yield
    finally:
        _activations.LEAST_BYTES = before


def trained(ranks, make, name, offloads, **options):
    """Losses, weights and the counters of a job."""
    model = ranks.shard(make())
    opt = ranks.attach(model, job=f"{ranks.job}.{name}", **options)
    losses = []
    for step in range(1, STEPS + 1):
        with opt.offload_activations() if offloads else contextlib.nullcontext():
            loss = loss_of(model, ranks.batch(step))
        loss.backward()
        opt.step()
        losses.append(loss.item())
        del loss
    result = losses, full(model), opt.stats()
    opt.detach()
    return result


def assert_same_training(ranks, make):
    """With room for all, for some and for nothing: the bits are those of a job that keeps everything."""
    losses, weights, _ = trained(ranks, make, "kept", False)
    used = []
    for name, room in (("all", ROOM), ("some", 2048), ("none", 64)):
        own, values, stats = trained(ranks, make, name, True, memory=forebay.Memory(activation_bytes=room))
        assert own == losses, (name, own, losses)
        assert all(torch.equal(values[one], weights[one]) for one in weights), name
        assert stats["activation_bytes"] == 0, stats
        assert stats["activation_bytes_max"] <= room, stats
        assert (stats["activation_bytes_stayed"] > 0) == (name != "all"), stats
        used.append(stats["activation_bytes_max"])
    assert used[0] > used[1] > 0, used


@case(1, 2)
def offloaded_activations(ranks):
    with tensors_of_any_size():
        assert_same_training(ranks, small_net)


@case(2)
def offloaded_checkpoints(ranks):
    """What torch.utils.checkpoint keeps of each layer, and what a layer's backward computes again."""
    with tensors_of_any_size():
        for reentrant in (False, True):
            ranks.job = f"{ranks.job}.{reentrant}"
            torch.manual_seed(1)
            assert_same_training(ranks, functools.partial(seeded, reentrant))


def seeded(reentrant):
    torch.manual_seed(1)
    return CheckpointedNet(reentrant)


@case(1, 2)
def offloaded_activations_leave_the_device(ranks):
    """Behind the forward nothing holds what the layers have computed, and each of several users of a
    tensor finds the one copy of it."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first = nn.Linear(8, 64)
            self.branches = nn.ModuleList(nn.Linear(64, 8) for _ in range(3))
            self.seen = []

        def forward(self, x):
            x = self.first(x).exp()
            self.seen.append(StorageWeakRef(x.untyped_storage()))
            return sum(branch(x) for branch in self.branches)

    with tensors_of_any_size():
        model = ranks.shard(Fork(), layers=())
        opt = ranks.attach(model, memory=forebay.Memory(activation_bytes=ROOM))
        x = torch.randn(16, 8)
        with opt.offload_activations():
            loss = model(x).sum()
        (seen,) = model.seen
        if opt._engine.device.is_host:  # on a device it lives until it was copied
            assert seen.expired()
        # The saved values are the input (16 x 8) and the result of exp() (16 x 64), which is saved once for its own backward
        # and three branches.
        kept = opt.stats()["activation_bytes"]
        assert kept == 4 * 16 * (8 + 64), kept
        loss.backward(retain_graph=True)
        first = [p.grad for p in model.parameters()]
        assert all(one is not None for one in first)
        assert opt.stats()["activation_bytes"] == kept
        del loss
        assert opt.stats()["activation_bytes"] == 0
        opt.step()
        opt.detach()


@case(1, 2)
def a_second_backward_of_offloaded_activations(ranks):
    """torch.autograd.grad through a retained graph: twice the same."""
    with tensors_of_any_size():
        model = ranks.shard(small_net())
        opt = ranks.attach(model, memory=forebay.Memory(activation_bytes=ROOM))
        x = torch.randn(3, 4, 8, requires_grad=True)
        weight = torch.randn(8, 8, requires_grad=True)
        with opt.offload_activations():
            y = ((x @ weight).sin().transpose(1, 2) * 2).exp()
        plain = ((x @ weight).sin().transpose(1, 2) * 2).exp()
        want = torch.autograd.grad(plain.sum(), (x, weight))
        for _ in range(2):
            got = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
            assert all(map(torch.equal, got, want))
        opt.detach()


@case(1)
def memory_of_odd_shapes_is_offloaded_as_it_is(ranks):
    """Transposed, sliced, expanded, empty, of other types: the same values and strides."""
    with tensors_of_any_size():
        model = ranks.shard(small_net())
        opt = ranks.attach(model, memory=forebay.Memory(activation_bytes=ROOM))
        room = opt._engine.activations
        base = torch.randn(6, 5, 4)
        tensors = [
            base,
            base.transpose(0, 2),
            base.permute(1, 2, 0),
            base[:, ::2],
            base[2:4],
            base[0, 0, :1].expand(7, 1),
            base.to(torch.float64),
            base.to(torch.bfloat16).t() if base.dim() == 2 else base.to(torch.bfloat16),
            base > 0,
            torch.arange(9),
            torch.empty(0, 3),
            torch.tensor(3.0),
            torch.randn(4, 4).to(torch.complex64),
            torch.randn(4, 4, dtype=torch.complex64).conj().resolve_conj(),
            torch.view_as_real(torch.randn(4, 4, dtype=torch.complex64)),
            torch.randn(4, 4, dtype=torch.complex64).imag,
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        ]
        packed = [room.pack(tensor) for tensor in tensors]
        assert sum(isinstance(one, _activations.Saved) for one in packed) >= 10
        for tensor, one in zip(tensors, packed):
            back = room.unpack(one)
            assert torch.equal(back, tensor), tensor
            assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        opt.detach()


class Tagged(torch.Tensor):
    """A subclass: its values alone are not all of it."""


@case(1)
def tensors_that_are_more_than_their_bytes_stay(ranks):
    """Conjugated or negated when they are read, quantized, without memory, wrapped: the tensor itself."""
    with tensors_of_any_size():
        opt = ranks.attach(ranks.shard(small_net()), memory=forebay.Memory(activation_bytes=ROOM))
        room = opt._engine.activations
        real, other = torch.randn(4, 5), torch.randn(4, 5, dtype=torch.complex64)
        freed = torch.randn(4, 5)
        freed.untyped_storage().resize_(0)
        with torch.inference_mode():
            inference = torch.randn(4, 5)
        with FakeTensorMode():
            fake = torch.randn(4, 5)
        tensors = {
            "conjugated": other.conj(),
            "transposed and conjugated": other.mH,
            "negated": torch._neg_view(real),
            "imaginary part of conjugated": other[:, :1].conj().imag,
            "zeros without memory": torch._efficientzerotensor(4, 5),
            "freed": freed,
            "quantized": torch.quantize_per_tensor(real, 0.1, 0, torch.qint8),
            "sparse": real.to_sparse(),
            "sparse rows": real.to_sparse_csr(),
            "nested": torch.nested.nested_tensor([real, real[:2]]),
            "functional": torch._to_functional_tensor(real),
            "subclass": real.as_subclass(Tagged),
            "of inference": inference,
            "fake": fake,
            "meta": real.to("meta"),
        }
        for name, tensor in tensors.items():
            assert room.pack(tensor) is tensor, name
        seen = []
        torch.func.vmap(lambda one: seen.append(room.pack(one) is one) or one)(real)
        torch.func.grad(lambda one: seen.append(room.pack(one) is one) or one.sum())(real)
        assert seen == [True, True]
        assert isinstance(room.pack(real), _activations.Saved)
        opt.detach()


@case(1)
def gradients_through_conjugated_and_negated_tensors(ranks):
    """Those of a graph that keeps everything itself."""
    with tensors_of_any_size():
        opt = ranks.attach(ranks.shard(small_net()), memory=forebay.Memory(activation_bytes=ROOM))
        inputs = [torch.randn(8, 8, dtype=torch.complex64, requires_grad=True) for _ in range(2)]
        for compute in (
            lambda a, b: (a.conj() * b).abs().pow(2),
            lambda a, b: (a.mH @ b).abs().pow(2),
            lambda a, b: (torch._neg_view(a.real) * b.imag).sin(),
            lambda a, b: (torch.fft.rfft(a.real) * torch.fft.rfft(b.real).conj()).abs(),
        ):
            want = torch.autograd.grad(compute(*inputs).sum(), inputs)
            with opt.offload_activations():
                result = compute(*inputs).sum()
            assert all(map(torch.equal, torch.autograd.grad(result, inputs), want))
        opt.detach()


class Product(nn.Module):
    """Its output's gradient with respect to `factor` is what the input held in forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.factor = [torch.ones(8, requires_grad=True)]

    def forward(self, x):
        return x * self.factor[0]


@case(1, 2)
def a_buffer_that_is_filled_again(ranks):
    """Where torch does not see it, while the graph of an earlier forward lives: each forward's values, in
    another entry, in one within it, in another thread and in another forward of the model."""

    def by_numpy(buffer, value):
        buffer.numpy()[:] = value

    def by_data(buffer, value):
        buffer.data.copy_(torch.full_like(buffer, value))

    with tensors_of_any_size():
        model = ranks.shard(Product(), layers=())
        opt = ranks.attach(model, memory=forebay.Memory(activation_bytes=ROOM))
        factor = model.factor[0]

        def entered_again(one, two):
            context = opt.offload_activations()
            with context:
                first = one()
            with context:
                return first, two()

        def nested(one, two):
            with opt.offload_activations():
                first = one()
                with opt.offload_activations():
                    return first, two()

        def behind_a_nested_one(one, two):
            with opt.offload_activations():
                with opt.offload_activations():
                    first = one()
                return first, two()

        def of_two_threads(one, two):
            results = []

            def work(forward):
                with opt.offload_activations():
                    results.append(forward())

            for forward in (one, two):
                thread = threading.Thread(target=work, args=(forward,))
                thread.start()
                thread.join()
            return results

        def of_one_entry(one, two):
            with opt.offload_activations():
                return one(), two()

        plain = functools.partial(torch.mul, factor)
        for fill in (by_data,) if factor.is_cuda else (by_numpy, by_data):
            for forward, order in (
                (plain, entered_again),
                (plain, nested),
                (plain, behind_a_nested_one),
                (plain, of_two_threads),
                (model, of_one_entry),
            ):
                buffer = torch.zeros(8)

                def filled(value):
                    fill(buffer, value)
                    return forward(buffer)

                kept, result = order(functools.partial(filled, 1.0), functools.partial(filled, 2.0))
                (gradient,) = torch.autograd.grad(result.sum(), factor)
                assert torch.equal(gradient, torch.full((8,), 2.0)), (fill, order, gradient)
                if opt._engine.device.is_host:  # the copy has the values at the time of the forward
                    (gradient,) = torch.autograd.grad(kept.sum(), factor)
                    assert torch.equal(gradient, torch.ones(8)), (fill, order, gradient)
                del kept, result
        assert opt.stats()["activation_bytes"] == 0
        opt.detach()


@case(1, 2)
def room_for_activations_is_refused(ranks):
    """Refused without room: by the sum, or by name; the model is as it was."""
    model = ranks.shard(small_net())
    with refused("E_DRAM_LIMIT", r"activations 1\.0 TiB", "dram.limit"):
        ranks.attach(model, memory=forebay.Memory(activation_bytes=1 << 40))
    for wrong in (-1, True, False, 1.5, "1MB", None):
        message = f"activation_bytes is {wrong!r}, not a whole number of bytes"
        with refused("E_OPTION", message, "activation_bytes="):
            ranks.attach(model, memory=forebay.Memory(activation_bytes=wrong))
    plain, memory = small_net(), {"activation_bytes": ROOM}
    with refused("E_OPTION", f"memory is {memory}, no forebay.Memory", r"memory=forebay.Memory\("):
        ranks.attach(plain, memory=memory, mode="sharded", sharding=forebay.Sharding(mesh=ranks.mesh))
    assert not any(isinstance(module, FSDPModule) for module in plain.modules())
    with refused("E_OPTION", "activation_bytes without mode", 'mode="sharded"'):
        ranks.attach(small_net().cpu(), memory=forebay.Memory(activation_bytes=1 << 20))
    opt = ranks.attach(model)
    with refused("E_OPTION", r"offload_activations\(\) of an attachment without room", "activation_bytes="):
        opt.offload_activations()
    opt.detach()


@case()
def a_tensor_that_changes_while_it_is_copied(ranks):
    """A tensor of a device: its backward says so, as torch does of a tensor that torch itself has saved."""
    with tensors_of_any_size():
        model = ranks.shard(small_net())
        opt = ranks.attach(model, memory=forebay.Memory(activation_bytes=ROOM))
        x = torch.randn(8, requires_grad=True)
        with opt.offload_activations():
            y = (x * 1).exp()
        y.detach().add_(1)
        with refused("E_UNSUPPORTED", r"shape \[8\] .* changed in place", "out of place"):
            y.sum().backward()
        opt.detach()

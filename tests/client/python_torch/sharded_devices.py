# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py for launches on a GPU that late_device.py makes."""

import forebay
import late_device
import torch
from forebay._device import HostDevice
from forebay._report import size
from forebay.sharded import shard_plan
from forebay.sharded.costs import gathered
from models import loss_of
from sharded_ranks import Twins, assert_same, case, full, refused, small_net


@case()
def weights_and_gradients_are_copied(ranks):
    """As many bytes as FSDP2 gathers and reduces; the bits are those of a job on CPUs."""
    on_device = small_net()
    ranks.shard(on_device)
    opt = ranks.attach(on_device)
    held = sum(4 * one._local_tensor.numel() for one in on_device.parameters())
    for step in range(1, 4):
        before = opt.stats()
        loss_of(on_device, ranks.batch(step)).backward()
        opt.step()
        after = opt.stats()
        assert after["grad_bytes"] - before["grad_bytes"] >= held
        # A layer's weights are copied for forward and again for backward. The root's weights stay gathered.
        assert held < after["copied_bytes"] - before["copied_bytes"] <= 2 * held + 64 * 1024
    of_device = full(on_device)
    opt.detach()
    before = shard_plan.device_of
    shard_plan.device_of = lambda units: HostDevice(units[0].device)
    try:
        on_host = ranks.shard(small_net())
        opt = ranks.attach(on_host, job=f"{ranks.job}.host")
        for step in range(1, 4):
            loss_of(on_host, ranks.batch(step)).backward()
            opt.step()
        assert_same(of_device, full(on_host))
        opt.detach()
    finally:
        shard_plan.device_of = before


def losses_of_three_steps(ranks, name):
    model = ranks.shard(small_net())
    opt = ranks.attach(model, job=f"{ranks.job}.{name}")
    found = []
    try:
        for step in range(1, 4):
            loss = loss_of(model, ranks.batch(step))
            loss.backward()
            opt.step()
            found.append(loss.item())
    except forebay.ForebayError as error:  # the driver's memory is full of NaN until it is written
        assert error.code == "E_NONFINITE" and late_device.LEFT_OUT
    late_device.LEFT_OUT.clear()
    opt.detach()
    return found


@case()
def a_rank_alone_waits_for_what_is_copied_ahead(ranks):
    """FSDP2 asks for a group's weights on the stream that it computes on, the copies are on another one."""
    model = ranks.shard(small_net())
    opt = ranks.attach(model, job=f"{ranks.job}.said")
    sizes = sorted((one.gathered_bytes for one in opt._plan.units), reverse=True)
    said = gathered(opt._plan.units, [], 0, opt._plan.copies_ahead)
    assert f"{size(sizes[0] + sizes[1])} copied ahead" in said, said
    opt.detach()
    right = losses_of_three_steps(ranks, "right")
    assert len(right) == 3 and right == losses_of_three_steps(ranks, "again")


@case()
def without_waits_a_rank_alone_computes_something_else(ranks):
    """With what has not come yet: those waits are needed. Or its process ends, since what torch has freed is written."""
    right = losses_of_three_steps(ranks, "right")
    late_device.LEFT_OUT[:] = ["every wait"]
    assert right != losses_of_three_steps(ranks, "wrong")


@case()
def a_machine_without_a_gpu(ranks):
    """Says so, and the model is as it was."""
    before = late_device.LIBRARY
    late_device.LIBRARY = "libcuda-that-is-nowhere.so.1"
    try:
        model = ranks.shard(small_net())
        with refused("E_UNSUPPORTED", "no CUDA on this machine.*libcuda-that-is-nowhere", "nvidia-smi"):
            ranks.attach(model)
    finally:
        late_device.LIBRARY = before
    ranks.attach(model).detach()


@case()
def two_devices_of_one_rank(ranks):
    """Each rank has one."""
    model = ranks.shard(small_net())
    opt = ranks.attach(model)
    units = opt._plan.units
    devices = iter([torch.device("cpu"), torch.device("cuda:1")])

    class Elsewhere:
        def __init__(self, unit):
            self.name, self.device = unit.name, next(devices)

    with refused("E_UNSUPPORTED", "is on device cpu, group .* on cuda:1", "one mesh"):
        late_device.DEVICE_OF([Elsewhere(unit) for unit in units[:2]])
    opt.detach()


@case()
def a_gpu_that_fails(ranks):
    """Its rank says so from then on; the others hear of it; the job is as it was. The last case of a launch:
    a process cannot continue with such a GPU."""
    twins = Twins(ranks).attach().train(2)
    loss_of(twins.ours, ranks.batch(3)).backward()
    if ranks.rank == 1:
        late_device.driver().fake_cuda_fail_copy(0)
        with refused("E_DEVICE", "CUDA_ERROR_ILLEGAL_ADDRESS", "Xid"):
            next(twins.ours.parameters()).to_local().clone()
        with refused("E_DEVICE", "CUDA_ERROR_ILLEGAL_ADDRESS", "Xid"):
            twins.opt.step()
    else:
        with refused("E_RANK_LOST", "rank 1", "attach again"):
            twins.opt.step()
    (job,) = (one for one in forebay.status()["jobs"] if one["name"] == ranks.job)
    assert job["committed_step"] == 2, job

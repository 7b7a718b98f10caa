# SPDX-License-Identifier: Apache-2.0
"""Goal    A reader has the weights of one committed step, whatever the ranks do meanwhile, and the
        states that they have; it delivers nothing, and its model stays a model of its own.
Method  A rank and a reader of one real daemon in this process; the rank trains on a thread and keeps
        the weights of each step, with which every copy of the reader is compared bit by bit.
"""

import threading

import forebay
import pytest
import torch
from models import net, train

STEPS = 30


@pytest.fixture
def trainer(node):
    model = net()
    return model, forebay.attach(model, forebay.AdamW(lr=1e-2))


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_each_copy_is_of_one_step_while_a_rank_trains(trainer):
    model, opt = trainer
    weights = {0: weights_of(model)}

    def run():
        for step in range(STEPS):
            train(model, opt, 1, first=step)
            weights[step + 1] = weights_of(model)

    own = net(seed=7)
    reader = forebay.attach_reader(own)
    thread = threading.Thread(target=run)
    thread.start()
    copies = []
    while thread.is_alive():
        step = reader.load_weights()
        copies.append((step, weights_of(own)))
    thread.join()
    copies.append((reader.load_weights(), weights_of(own)))
    assert copies[-1][0] == reader.committed_step == STEPS
    assert [step for step, _ in copies] == sorted(step for step, _ in copies)
    for step, copy in copies:
        for name, values in copy.items():
            assert torch.equal(values, weights[step][name]), f"{name} of step {step}"


def test_states_are_the_ranks_and_the_model_stays_private(trainer):
    model, opt = trainer
    train(model, opt, 2)
    own = net(seed=7)
    reader = forebay.attach_reader(own)
    before = weights_of(own)
    for name, _ in model.named_parameters():
        theirs, ours = opt.read_state(name), reader.read_state(name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[state], theirs[state]) for state in theirs)
    reader.load_weights()
    with torch.no_grad():
        own.norm.weight.add_(1)  # writes private memory, not the job's
    assert not torch.equal(own.norm.weight, model.norm.weight)
    assert any(not torch.equal(own.get_parameter(name), values) for name, values in before.items())
    reader.detach()
    train(model, opt, 1, first=2)
    assert opt.committed_step == 3


class SteppingBetweenReads:
    """An attachment after whose reads of a state a rank steps: after as many as `steps` has."""

    def __init__(self, attachment, steps):
        self.attachment, self.steps, self.reads = attachment, iter(steps), 0

    def __getattr__(self, name):
        return getattr(self.attachment, name)

    def read_state(self, *where):
        result = self.attachment.read_state(*where[:-1], 30)
        self.reads += 1
        next(self.steps, lambda: None)()
        return result


def test_all_states_of_a_parameter_are_of_one_step(trainer):
    model, opt = trainer
    train(model, opt, 1)
    reader = forebay.attach_reader(net(seed=7))

    def read(name, steps):
        reader._attachment = SteppingBetweenReads(attachment, steps)
        return reader.read_state(name), reader._attachment.reads

    attachment = reader._attachment
    name = "norm.weight"
    states, reads = read(name, [lambda: train(model, opt, 1, first=1)])
    theirs = opt.read_state(name)
    assert all(torch.equal(states[state], theirs[state]) for state in theirs)
    assert states["step"] == 2 and reads == 4
    states, reads = read(name, [opt.step])  # this step has no gradient and changes no state
    assert states["step"] == 2 and reads == 2 and opt.committed_step == 3
    reader._timeout = 0.0
    with pytest.raises(forebay.ForebayTimeoutError, match=f"states of {name} ended") as caught:
        read(name, [lambda: train(model, opt, 1, first=3)] * 2)
    assert caught.value.code == "E_TIMEOUT"
    reader._attachment = attachment


def test_what_cannot_be_read_is_refused_by_name(trainer):
    model, _ = trainer
    with pytest.raises(forebay.UsageError) as caught:
        forebay.attach_reader(net(), job="nobody-trains-this")
    assert caught.value.code == "E_JOB_NAME" and "nobody-trains-this" in str(caught.value)
    with pytest.raises(forebay.UsageError) as caught:
        forebay.attach_reader(net(layers=2))
    assert caught.value.code == "E_LAYOUT"
    with pytest.raises(forebay.UsageError) as caught:
        forebay.attach_reader(model)
    assert caught.value.code == "E_UNSUPPORTED" and "attached already" in str(caught.value)
    reader = forebay.attach_reader(net())
    with pytest.raises(forebay.UsageError) as caught:
        reader.read_state("no.such")
    assert caught.value.code == "E_OPTION"

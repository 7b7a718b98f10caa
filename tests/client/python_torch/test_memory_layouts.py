# SPDX-License-Identifier: Apache-2.0
"""Goal    Parameters are attached with their values however they lie in memory; what shares memory in
        part is refused by name, since windows of their own would cut the tie.
Method  Modules whose parameters are views; attached to the daemon.
"""

import forebay
import pytest
import torch
from torch import nn


class Holder(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x):
        return sum((parameter * x).sum() for parameter in self.parameters())


def refused(model):
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(forebay.ForebayError) as error:
        forebay.attach(model)
    assert error.value.code == "E_UNSUPPORTED"
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    return str(error.value)


def test_parameters_that_share_a_part_of_their_memory_are_refused():
    memory = torch.randn(20)
    message = refused(Holder(a=memory[:10], b=memory[5:15]))
    assert "a and b share memory" in message


def test_a_parameter_whose_elements_are_one_is_refused():
    assert "parameter a" in refused(Holder(a=torch.zeros(1).expand(10)))


def test_views_of_one_memory_that_share_nothing_are_attached(node):
    memory = torch.randn(6, 4)
    model = Holder(rows=memory[:2], left=memory[2:, :2], right=memory[2:, 2:], scalar=memory.sum())
    values = [parameter.detach().clone() for parameter in model.parameters()]
    opt = forebay.attach(model)
    for parameter, value in zip(model.parameters(), values):
        assert torch.equal(parameter.detach(), value)
    model(torch.tensor(2.0)).backward()
    opt.step()
    assert opt.committed_step == 1
    for parameter, value in zip(model.parameters(), values):
        assert not torch.equal(parameter.detach(), value)

# SPDX-License-Identifier: Apache-2.0
# Goal    An update that makes weights infinite is an error with the number of them; the step is committed
#         nevertheless, and the daemon serves other jobs.
# Method  SGD with a learning rate that takes one of three weights beyond float32.

import forebay
import pytest
import torch


def test_weights_that_overflow_are_an_error_of_a_committed_step(node):
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3e38]]))
    opt = forebay.attach(model, forebay.SGD(lr=3e38))
    model(torch.tensor([[0.0, 0.0, -1.0]])).sum().backward()
    with pytest.raises(forebay.UsageError, match="1 parameters of job .* became non-finite") as info:
        opt.step()
    assert info.value.code == "E_OVERFLOW" and "checkpoint" in info.value.hint
    assert opt.committed_step == 1
    assert model.weight.tolist() == [[1.0, 2.0, float("inf")]]

# SPDX-License-Identifier: Apache-2.0
# Goal    The package passes mypy --strict; every public function, method and class of it is
#         annotated and documented, with an example that runs.
# Method  mypy on the package's sources; the doctests of each public name on the real daemon, each
#         with a model and a job of its own.

import doctest
import inspect
import os
import pathlib
import subprocess
import sys
import time

import forebay
import pytest
import torch
from forebay import _optimizer, _progress, api, errors, optimizers, options
from forebay.states import reader, state_dict

SOURCES = pathlib.Path(__file__).resolve().parents[3] / "client" / "python"


def public_names():
    """(name, object) of what a user can call."""
    for module in (api, errors, optimizers, options):
        for name, thing in vars(module).items():
            if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__:
                if inspect.isfunction(thing) or inspect.isclass(thing):
                    yield f"{module.__name__}.{name}", thing
    shown = (_optimizer.ForebayOptimizer, state_dict.StateDicts, _progress.Progress, reader.Reader)
    for kind in (*shown, *optimizer_classes()):
        for name, thing in vars(kind).items():
            if not name.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, property)):
                yield f"{kind.__name__}.{name}", thing
    for kind in shown:
        yield kind.__name__, kind


def optimizer_classes():
    kinds = [optimizers.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return dict.fromkeys(kinds)


NAMES = dict(public_names())


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of(node, name):
    thing = NAMES[name]
    is_error = inspect.isclass(thing) and issubclass(thing, forebay.ForebayError)
    assert thing.__doc__, f"{name} has no documentation"
    if is_error or thing is optimizers.Optimizer:
        return  # a family of errors, and a base class: nothing to call
    torch.manual_seed(1)
    names = {
        "forebay": forebay,
        "torch": torch,
        "model": torch.nn.Linear(4, 2),
        "inputs": torch.randn(3, 4),
        **vars(errors),
    }
    example = doctest.DocTestParser().get_doctest(thing.__doc__, names, name, None, None)
    assert example.examples, f"{name} has no example"
    os.environ["FOREBAY_JOB"] = f"{name}.{time.monotonic_ns()}"
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed
    assert failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_annotations_of(name):
    thing = NAMES[name]
    function = thing.fget if isinstance(thing, property) else thing
    if inspect.isfunction(function):
        parameters = set(inspect.signature(function).parameters) - {"self"}
        assert parameters | {"return"} == set(function.__annotations__), name


def test_mypy_strict():
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    cache = ["--cache-dir", str(SOURCES.parents[1] / "build" / "mypy")]
    done = subprocess.run(
        [*command, *cache, "forebay"], cwd=SOURCES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

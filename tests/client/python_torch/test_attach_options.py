# SPDX-License-Identifier: Apache-2.0
# Goal    Every keyword of 0.2.0 that is a part of an option of attach() now makes the same request as the option, and warns at the
#         line of the call. Beside its option it is refused, and both names are in the error. The page of options lists each.
# Method  Each keyword alone, beside its option, and through the doors of Accelerate and of the Trainer. The request is compared
#         where attach() hands it to the mode; what the extension gets of it is compared with the daemon's attach in its place.

import dataclasses
import inspect
import pathlib
import re
import warnings

import forebay
import pytest
import torch
from forebay import _attach, options
from huggingface import needs_huggingface
from models import net

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "options.md"
MESH, POLICY, MODULES = object(), object(), []  # fully_shard() is not called with them
OLD = {  # keyword of 0.2.0: the option, a value that is not the default
    "mesh": ("sharding", MESH),
    "mp_policy": ("sharding", POLICY),
    "reshard_after_forward": ("sharding", False),
    "wrap": ("sharding", MODULES),
    "name_prefix": ("sharding", "stage0."),
    "drain": ("sharding", False),
    "early_updates": ("sharding", False),
    "extra_state_bytes": ("memory", 123456),
    "grad_arena_bytes": ("memory", 1 << 20),
    "prefetch_bytes": ("memory", 2 << 20),
    "activation_bytes": ("memory", 3 << 20),
    "daemon_wait": ("durability", 7.5),
}
KINDS = {"sharding": forebay.Sharding, "memory": forebay.Memory, "durability": forebay.Durability}
SENT = {  # of those, what the extension gets
    "drain": False,
    "early_updates": False,
    "extra_state_bytes": 123456 + 16,
    "grad_arena_bytes": 1 << 20,
    "activation_bytes": 3 << 20,
    "daemon_wait": 7.5,
}


class AttachEnds(Exception):
    """Carries what was passed on."""


def end(*passed):
    raise AttachEnds(passed[-1])


@pytest.fixture
def group(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def request_of(group, monkeypatch):
    """The request that attach(**arguments) makes, and which of its arguments it warned of."""
    monkeypatch.setattr(_attach, "shard", lambda model, rule, request: request)
    monkeypatch.setattr(_attach, "attach_sharded", end)

    def made(**arguments):
        with warnings.catch_warnings(record=True) as caught, pytest.raises(AttachEnds) as passed:
            warnings.simplefilter("always")
            forebay.attach(net(), mode="sharded", **arguments)
        ours = [one for one in caught if "of attach()" in str(one.message)]
        assert all(one.category is FutureWarning and one.filename == __file__ for one in ours)
        return passed.value.args[0], [str(one.message) for one in ours]

    return made


def test_each_keyword_that_has_moved_is_listed():
    assert {name: topic for name, (topic, _) in OLD.items()} == options.MOVED


@pytest.mark.parametrize("name", OLD)
def test_a_keyword_of_the_release_before_makes_the_request_of_its_option(request_of, name):
    topic, value = OLD[name]
    new, quiet = request_of(**{topic: KINDS[topic](**{name: value})})
    old, warned = request_of(**{name: value})
    assert old == new and getattr(getattr(new, topic), name) is value
    assert getattr(KINDS[topic](), name) != value
    option = f"{topic}=forebay.{KINDS[topic].__name__}({name}=...)"
    assert quiet == [] and warned == [f"{name}= of attach() ends with 0.4: write {option}"]


@pytest.mark.parametrize("name", OLD)
def test_a_keyword_of_the_release_before_beside_its_option_is_refused(group, name):
    topic, value = OLD[name]
    with pytest.warns(FutureWarning, match=name), pytest.raises(forebay.UsageError) as info:
        forebay.attach(net(), mode="sharded", **{name: value, topic: KINDS[topic]()})
    assert info.value.code == "E_OPTION" and f"{name}= beside {topic}=" in str(info.value)


def test_a_level_alone_and_beside_the_keyword_of_the_release_before(request_of):
    request, warned = request_of(durability="epoch=3")
    assert request.durability == forebay.Durability(level="epoch=3") and warned == []
    request, warned = request_of(durability="epoch=3", daemon_wait=7.5)
    assert request.durability == forebay.Durability(level="epoch=3", daemon_wait=7.5) and len(warned) == 1


def test_several_keywords_of_the_release_before(request_of):
    request, warned = request_of(**{name: value for name, (_, value) in OLD.items()})
    for name, (topic, value) in OLD.items():
        assert getattr(getattr(request, topic), name) is value
    assert len(warned) == len(OLD)


@pytest.mark.parametrize("name", ["level", "unknown"])
def test_a_keyword_that_attach_never_had(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        forebay.attach(net(), **{name: "step"})


@pytest.mark.parametrize("topic", KINDS)
def test_an_option_of_another_kind(group, topic):
    with pytest.raises(forebay.UsageError, match=f"{topic} is {{}}") as info:
        forebay.attach(net(), mode="sharded", **{topic: {}})
    assert info.value.code == "E_OPTION"


@pytest.mark.parametrize("name", SENT)
def test_the_extension_gets_what_the_option_has(node, group, monkeypatch, name):
    topic, value = OLD[name]
    sent = []
    for arguments in ({}, {topic: KINDS[topic](**{name: value})}):
        with monkeypatch.context() as patched, pytest.raises(AttachEnds) as passed:
            patched.setattr(forebay._core, "attach", end)
            forebay.attach(net(), mode="sharded", **arguments)
        sent.append(passed.value.args[0])
    plain, own = sent
    assert own[name] == SENT[name] != plain.get(name)
    assert {key for key in own if own[key] != plain.get(key)} <= {name, "nodes"}


@needs_huggingface
@pytest.mark.parametrize("name", OLD)
def test_the_doors_take_a_keyword_of_the_release_before(tmp_path, name):
    import transformers
    from forebay.integrations import accelerate, transformers as ours

    topic, value = OLD[name]
    with pytest.warns(FutureWarning, match=f"{name}= of attach") as caught:
        of_accelerate = accelerate.Accelerator(cpu=True, forebay={name: value}).forebay_options
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
        of_trainer = ours.Trainer(net(), arguments, forebay={name: value})._options
    assert of_accelerate == of_trainer == {topic: KINDS[topic](**{name: value})}
    assert [one.filename for one in caught if "of attach()" in str(one.message)] == [__file__] * 2


@needs_huggingface
@pytest.mark.parametrize("room", [None, 1 << 20])
def test_a_trainer_makes_room_for_what_it_commits(node, tmp_path, room):
    import transformers
    from forebay.integrations import transformers as ours

    memory = forebay.Memory(extra_state_bytes=room, grad_arena_bytes=2 << 20)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = ours.Trainer(net(), arguments, forebay={"memory": memory, "job": tmp_path.name})
    opt = trainer.create_optimizer().optimizer
    assert opt._extra_state_bytes == (room or ours.STATE_BYTES)
    opt.detach()


def test_the_page_lists_each_option():
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| .* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)[2:]
    in_python, in_cpp, in_c = (
        sorted(name for row in rows for name in re.findall(r"`([\w.]+)`", row[column])) for column in range(3)
    )
    named = set(inspect.signature(forebay.attach).parameters) - {"model", "optimizer", "old", *KINDS}
    parts = {f"{topic}.{one.name}" for topic, kind in KINDS.items() for one in dataclasses.fields(kind)}
    assert in_python == sorted(named | parts)
    for names, header in ((in_cpp, "client.h"), (in_c, "forebay.h")):
        text = (ROOT / "client" / header).read_text(encoding="utf-8")
        assert names and all(re.search(rf"\b{name.split('.')[-1]}\b", text) for name in names), header

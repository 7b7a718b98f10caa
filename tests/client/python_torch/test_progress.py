# SPDX-License-Identifier: Apache-2.0
# Goal    opt.metrics() is a flat dict of floats that agrees with the daemon's status, asks the daemon once or not at
#         all, and does without it; Progress shows them on one line, of rank 0; a trace of torch.profiler has a
#         range for each call that can wait.
# Method  Steps on the daemon; files in memory in the place of a terminal; a status of the
#         test's own where numbers have to move.

import io
from types import SimpleNamespace

import forebay
import pytest
import torch
from forebay import _metrics
from models import batch, loss_of, net
from torch.profiler import ProfilerActivity, profile

OWN = {"forebay/step", "forebay/step_s", "forebay/exposed_wait_s"}
DAEMONS = {"forebay/dram_used_bytes", "forebay/dram_limit_bytes", "forebay/job_dram_bytes"}
DAEMONS |= {"forebay/swap_used_bytes", "forebay/update_s"}
RATES = {"forebay/swap_read_bytes_per_s", "forebay/swap_write_bytes_per_s"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Status:
    """In the place of _core.status: counts the calls, and says what the test wants."""

    def __init__(self, monkeypatch, answer):
        from forebay import _core

        self.calls, self.answer = 0, answer
        monkeypatch.setattr(_core, "status", self)

    def __call__(self, *_arguments):
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def status_of(read=0, written=0, used=4096):
    swap = {"read_bytes": read, "written_bytes": written, "used_bytes": used}
    return {
        "memory": {"used_bytes": 3 << 20, "limit_bytes": 1 << 30, "arenas": []},
        "swap": [swap, {"read_bytes": 5, "written_bytes": 7, "used_bytes": 0}],
        "jobs": [],
    }


def trained(steps=1, **options):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-3, **options))
    for step in range(steps):
        loss_of(model, batch(step)).backward()
        opt.step()
    return model, opt


def test_metrics_are_what_the_daemon_says(node):
    _, opt = trained(2, max_grad_norm=1.0)
    values = opt.metrics()
    assert values.keys() == OWN | DAEMONS | {"forebay/grad_norm"}
    assert all(type(value) is float for value in values.values())
    assert values["forebay/step"] == 2 and values["forebay/grad_norm"] == opt.grad_norm
    status = forebay.status()
    arenas = [arena for arena in status["memory"]["arenas"] if arena["job"] == opt._engine.node.job]
    assert values["forebay/job_dram_bytes"] == sum(arena["allocated_bytes"] for arena in arenas) > 0
    assert values["forebay/dram_limit_bytes"] == status["memory"]["limit_bytes"]
    assert values["forebay/job_dram_bytes"] < values["forebay/dram_used_bytes"]
    (job,) = (job for job in status["jobs"] if job["name"] == opt._engine.node.job)
    assert values["forebay/update_s"] == job["last_step_seconds"] > 0
    assert opt.metrics().keys() == values.keys() | RATES


def test_a_step_lasts_from_the_end_of_the_one_before(node):
    model, opt = trained(0)
    assert opt.metrics(daemon=False) == {
        "forebay/step": 0.0,
        "forebay/step_s": 0.0,
        "forebay/exposed_wait_s": 0.0,
    }
    for step in range(2):
        loss_of(model, batch(step)).backward()
        opt.stats()  # resets its own count only, not that of metrics()
        opt.step()
        values = opt.metrics(daemon=False)
        timeline = opt.stats()["timeline"]
        assert 0 < values["forebay/exposed_wait_s"] < values["forebay/step_s"]
        step_call_s = sum(end - begin for kind, _, begin, end in timeline if kind == "step") / 1e9
        assert values["forebay/exposed_wait_s"] > step_call_s, "the backward's hooks are part of it"
    loss_of(model, batch(2)).backward()
    assert opt.metrics(daemon=False) == values, "of the newest committed step"


def test_the_daemon_is_asked_once_or_not_at_all(node, monkeypatch):
    _, opt = trained()
    status = Status(monkeypatch, status_of())
    assert opt.metrics(daemon=False).keys() == OWN and status.calls == 0
    opt.metrics()
    assert status.calls == 1


def test_swap_rates_are_those_between_two_calls(node, monkeypatch):
    _, opt = trained()
    clock = iter((10.0, 14.0, 15.0))
    status = Status(monkeypatch, status_of(read=100, written=1000))
    monkeypatch.setattr(_metrics, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert not RATES & opt.metrics().keys()
    status.answer = status_of(read=900, written=1400)
    values = opt.metrics()
    assert values["forebay/swap_read_bytes_per_s"] == 200.0
    assert values["forebay/swap_write_bytes_per_s"] == 100.0
    status.answer = status_of(read=1, written=1)
    assert not RATES & opt.metrics().keys(), "another daemon's counters"


def test_without_an_answer_of_the_daemon_its_numbers_are_missing(node, monkeypatch):
    _, opt = trained()
    Status(monkeypatch, forebay.UnavailableError("error[E_NO_DAEMON]: nobody listens"))
    assert opt.metrics().keys() == OWN
    lines = io.StringIO()
    forebay.Progress(opt, file=lines).update()
    assert lines.getvalue().startswith("step 1  ") and "DRAM" not in lines.getvalue()


def test_elsewhere_each_line_stands_for_itself(node, monkeypatch):
    model, opt = trained()
    Status(monkeypatch, status_of())
    lines = io.StringIO()
    with forebay.Progress(opt, total=4, every=0, file=lines) as progress:
        for step in (2, 3):
            loss_of(model, batch(step)).backward()
            opt.step()
            progress.update(loss=0.25, accuracy=1 / 3)
    first, second = lines.getvalue().splitlines()
    assert first.startswith("step 2/4  ") and second.startswith("step 3/4  ")
    for word in ("s/step  wait ", "DRAM 3.0 MiB of 1.0 GiB", "loss 0.25  accuracy 0.3333", "left 0:00:0"):
        assert word in second
    assert "swap 0.00 GB/s read, 0.00 written" in second and "swap" not in first


def test_lines_come_no_oftener_than_asked_for_and_the_last_step_is_shown(node):
    model, opt = trained()
    lines = io.StringIO()
    progress = forebay.Progress(opt, every=3600, file=lines)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
        progress.update()
    assert [line.split()[1] for line in lines.getvalue().splitlines()] == ["2"]
    progress.close()
    progress.close()
    progress.update()
    assert [line.split()[1] for line in lines.getvalue().splitlines()] == ["2", "4"]


def test_a_terminals_line_is_written_over(node, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, opt = trained()
    screen = Terminal()
    with forebay.Progress(opt, every=0, file=screen) as progress:
        progress.update(a_long_name_of_a_value_that_is_cut=1.0)
        progress.update()
        opt.metrics = lambda: {"forebay/step": 7.0, "forebay/step_s": 0.0, "forebay/exposed_wait_s": 0.0}
        progress.update()
    start, *states, end = screen.getvalue().replace("\n", "\r\n").split("\r")
    assert start == "" and end == "\n" and len(states) == 3
    assert len(states[0]) == 59 and states[2].rstrip() == "step 7"
    assert len(states[2]) >= len(states[1].rstrip()), "what stood there is covered"


def test_an_error_ends_the_line_and_asks_no_daemon(node, monkeypatch):
    _, opt = trained()
    status = Status(monkeypatch, status_of())
    screen = Terminal()
    with pytest.raises(KeyError):
        with forebay.Progress(opt, every=0, file=screen) as progress:
            progress.update()
            opt.step()
            raise KeyError
    assert status.calls == 1 and screen.getvalue().endswith("\n")


def test_rank_0_alone_shows_it(node):
    _, opt = trained()
    opt._engine.node.rank = 1
    lines = io.StringIO()
    with forebay.Progress(opt, every=0, file=lines) as progress:
        progress.update()
    assert lines.getvalue() == ""


@pytest.mark.parametrize("wrong", [{"every": -1}, {"every": "often"}, {"total": 0}, {"total": 1.5}])
def test_wrong_arguments(node, wrong):
    _, opt = trained()
    with pytest.raises(forebay.UsageError, match=next(iter(wrong))) as info:
        forebay.Progress(opt, **wrong)
    assert info.value.code == "E_OPTION" and info.value.hint.startswith(next(iter(wrong)) + "=")


def test_a_trace_of_the_profiler_has_a_range_for_each_call_that_can_wait(node):
    model, opt = trained()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        loss_of(model, batch(1)).backward()
        opt.zero_grad()
        loss_of(model, batch(1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.read_state("norm.weight")
    ranges = {event.name for event in trace.events() if event.name.startswith("forebay.")}
    for group in ("layers.0", "layers.1", "layers.2"):
        assert {f"forebay.fetch {group}", f"forebay.deliver {group}"} <= ranges
    assert "forebay.deliver layers.1.up.weight" in ranges
    assert {"forebay.drop", "forebay.norm", "forebay.step", "forebay.read_state norm.weight"} <= ranges
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model(batch(1)[:, :-1])
    ranges = {event.name for event in trace.events() if event.name.startswith("forebay.")}
    assert ranges and all(name.startswith("forebay.fetch ") for name in ranges)

# SPDX-License-Identifier: Apache-2.0
"""Goal    forebay._core: views that torch takes silently and that outlive their creator, errors with
        code and hint, calls without the GIL that answer Ctrl-C, forks and faults.
Method  The built extension on a real daemon; what ends a process runs in one of its own.
"""

import concurrent.futures
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch
from core_daemon import PARAMS, CORE, HYPER, ROOT, attach, core, initial, write_all
from daemon_process import FOREBAYD

DTYPES = [("float32", "fp32", torch.float32), ("bfloat16", "exact", torch.bfloat16)]


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


def run_script(socket, body):
    """Runs Python code in a process of its own that has `core`, `attach`, `write_all`, `socket`."""
    head = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests" / "client" / "python")!r})
        from core_daemon import *
        import torch
        socket = {socket!r}
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body)],
        env={**os.environ, "FOREBAY_CORE": CORE},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name, format, dtype", DTYPES)
def test_views_are_tensors_of_the_jobs_dtype_without_a_warning(core_node, job, name, format, dtype):
    session = attach(core_node, job, dtype=name, format=format)
    write_all(session, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window = torch.from_dlpack(session.weights(0)).data_ptr()
        for group, (offset, elems) in enumerate(session.groups):
            weights = torch.from_dlpack(session.weights(group))
            assert weights.dtype == dtype and weights.shape == (elems,) and weights.device.type == "cpu"
            assert torch.equal(weights, initial(session, group, dtype))
            assert weights.data_ptr() == window + offset
            slot = torch.from_dlpack(session.grad_slot(group))
            assert slot.dtype == dtype and slot.shape == (elems,) and slot.count_nonzero() == 0
            slot.fill_(1)
    assert session.param_offsets == [0, 50, 0]
    session.detach()


def test_views_outlive_the_attachment(core_node, job):
    session = attach(core_node, job)
    write_all(session, torch.float32)
    weights = torch.from_dlpack(session.weights(1))
    slot = torch.from_dlpack(session.grad_slot(1))
    expected = initial(session, 1, torch.float32)
    session.detach()
    del session
    gc.collect()
    assert torch.equal(weights[:300], expected)
    slot.fill_(2)
    assert slot.sum() == 2 * slot.numel()


def test_two_ranks_step_as_torch_does(core_node, job):
    ranks = [attach(core_node, job, 0, 2)]
    write_all(ranks[0], torch.float32)
    ranks.append(attach(core_node, job, 1, 2))
    model = [initial(ranks[0], g, torch.float32).requires_grad_() for g in (0, 1)]
    reference = torch.optim.AdamW(model, lr=0.1, weight_decay=0.0)
    for t in range(1, 6):
        gradients = [
            [torch.sin(torch.arange(p.numel()) * (r + 1.0) + t) for p in model] for r in (0, 1)
        ]
        for p, *both in zip(model, *gradients):
            p.grad = (both[0] + both[1]) / 2
        reference.step()
        results = {}

        def step(rank):
            session = ranks[rank]
            for group, (_, elems) in enumerate(session.groups):
                slot = torch.from_dlpack(session.grad_slot(group, 30.0, False))
                slot[:elems] = gradients[rank][group]
                session.grad_ready(group)
            results[rank] = session.step(t, HYPER, 0.0, b"extra %d" % rank, 30.0)

        other = threading.Thread(target=step, args=(1,))
        other.start()
        step(0)
        other.join()
        assert results == {0: (t, 0.0, False, False), 1: (t, 0.0, False, False)}
        for group, p in enumerate(model):
            weights = torch.from_dlpack(ranks[0].weights(group))
            # The two sides may round each operation in another order: 8 ulp of a value of about 1.
            torch.testing.assert_close(weights[: p.numel()], p.detach(), rtol=0, atol=1e-6)
    at = {"embed": (0, 0), "w": (0, 50), "head": (1, 0)}  # group, first element
    for name, shape, *_ in PARAMS:
        group, first = at[name]
        elems = torch.Size(shape).numel()
        for state in ("exp_avg", "exp_avg_sq"):
            view, updates = ranks[0].read_state(name, state, 0, elems)
            wanted = reference.state[model[group]][state][first : first + elems]
            torch.testing.assert_close(torch.from_dlpack(view), wanted, rtol=1e-5, atol=1e-7)
            assert updates == 5
    counters = ranks[0].counters()
    assert counters["wait_ns_total"] >= counters["wait_ns_step"] > 0
    for session in ranks:
        session.detach()
    again = attach(core_node, job, 0, 2)
    assert (again.committed_step, again.extra_state) == (5, b"extra 0")


def test_states_are_float32_in_the_order_of_elements(core_node, job):
    session = attach(core_node, job, dtype="bfloat16", format="exact")
    write_all(session, torch.bfloat16)
    assert session.states == ["master", "exp_avg", "exp_avg_sq"]
    master, updates = session.read_state("embed", "master", 3, 20)
    assert torch.from_dlpack(master).dtype == torch.float32 and updates == 0
    written = initial(session, 0, torch.bfloat16).float()
    assert torch.equal(torch.from_dlpack(master), written[3:23])
    for elems in (301, 2**62):  # refused before memory is allocated
        with pytest.raises(core.UsageError, match=f"{elems} elements") as caught:
            session.read_state("head", "exp_avg", 0, elems)
        assert caught.value.code == "E_RANGE" and "which has 300" in str(caught.value)
    moment, _ = session.read_state("head", "exp_avg", 0, 300)
    assert torch.from_dlpack(moment).count_nonzero() == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"jib": "x"}, "attach has no option jib"),
        ({"rank": -1}, "option rank is -1"),
        ({"resume": "yes"}, "option resume is 'yes'"),
        ({"params": [("w", 3)]}, "option params is [('w', 3)]"),
        ({"durability": "hourly"}, '"hourly" is no level of durability'),
        ({"optimizer": "adamx"}, "adamx"),
        ({3: 4}, "option 3 is no name"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_of_attach_that_it_does_not_have(core_node, wrong, said):
    with pytest.raises(core.UsageError) as caught:
        core.attach({"socket": core_node, "job": "job", **wrong})
    assert caught.value.code == "E_OPTION" and said in str(caught.value)


def test_errors_have_a_family_code_hint_and_say_whether_to_retry(core_node, job, tmp_path):
    with pytest.raises(core.UnavailableError) as caught:
        core.status(str(tmp_path / "none"))
    assert caught.value.code == "E_NO_DAEMON" and caught.value.retryable
    assert "forebay run" in caught.value.hint
    assert str(caught.value).startswith("error[E_NO_DAEMON]: ")
    with pytest.raises(core.UsageError) as caught:
        attach(core_node, job, dtype="int8")
    assert caught.value.code == "E_OPTION" and not caught.value.retryable
    with pytest.raises(core.UsageError) as caught:
        attach(core_node, job, dtype="float16", format="exact")
    assert caught.value.code == "E_OPTION"
    session = attach(core_node, job, 0, 2)
    with pytest.raises(TimeoutError) as caught:
        attach(core_node, job, 1, 2, timeout=0.05)
    assert isinstance(caught.value, core.ForebayTimeoutError) and caught.value.code == "E_TIMEOUT"
    for call in (session.weights, session.fetch, session.grad_slot, session.grad_ready):
        with pytest.raises(core.UsageError) as caught:
            call(2)
        assert caught.value.code == "E_RANGE"
    with pytest.raises(core.UsageError) as caught:
        session.step(1, HYPER, 0.0, b"x" * 4097, 1.0)
    assert caught.value.code == "E_EXTRA_STATE"
    assert issubclass(core.DataLossError, core.ForebayError)
    session.detach()
    with pytest.raises(core.ForebayError) as caught:
        session.fetch(0)
    assert caught.value.code == "E_FENCED"


def test_status_trace_and_delete(core_node, job):
    session = attach(core_node, job)
    write_all(session, torch.float32)
    torch.from_dlpack(session.grad_slot(0)).fill_(1)
    session.grad_ready(0)
    session.step(1, HYPER)
    status = core.status(core_node, timeout=float("inf"))
    mine = next(entry for entry in status["jobs"] if entry["name"] == job)
    assert mine["committed_step"] == 1 and mine["groups"] == ["embed", "head"]
    assert status["memory"]["used_bytes"] <= status["memory"]["limit_bytes"] == 1 << 30
    events = core.trace(core_node, job)
    seen = {(event["process"], event["lane"]) for event in events}
    assert seen >= {("forebayd", "update"), ("forebayd", "step"), ("rank 0", "gradient call"), ("rank 0", "step call")}
    assert {event["name"] for event in events if event["lane"] == "step call"} == {"step 1"}
    with pytest.raises(core.ForebayError):
        core.delete_job(core_node, job)
    session.detach()
    core.delete_job(core_node, job)
    assert all(entry["name"] != job for entry in core.status(core_node)["jobs"])


def test_trace_for_perfetto(core_node, job):
    """A process of each, tracks with names, whose events follow on each other."""
    first = attach(core_node, job, 0, 2)
    write_all(first, torch.float32)
    sessions = [first, attach(core_node, job, 1, 2)]
    for session in sessions:
        torch.from_dlpack(session.grad_slot(0)).fill_(1)
        session.grad_ready(0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda session: session.step(1, HYPER), sessions))
    command = [FOREBAYD.with_name("forebay"), "trace", job, "--perfetto", "--socket", core_node]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events = json.loads(done.stdout)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    processes = {name for (_, track), name in names.items() if track == 0}
    assert processes == {"forebayd", "rank 0", "rank 1"}
    assert {"update", "step", "gradient call", "step call"} <= set(names.values())
    ends = {}
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert names[track] == event["cat"] and event["dur"] >= 0
            assert event["ts"] >= ends.get(track, 0)
            ends[track] = event["ts"] + event["dur"]
    assert len(ends) >= 6
    for session in sessions:
        session.detach()


def test_ctrl_c_ends_a_wait_and_the_step_can_be_waited_for_again(core_node, job):
    first = attach(core_node, job, 0, 2)
    write_all(first, torch.float32)
    second = attach(core_node, job, 1, 2)
    before = first.counters()["commands"]

    def interrupt():
        wait_until(lambda: first.counters()["commands"] != before)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        first.step(1, HYPER, 0.0, b"", float("inf"))
    thread.join()
    thread = threading.Thread(target=lambda: second.step(1, HYPER))
    thread.start()
    assert first.step(1, HYPER, 0.0, b"", 30.0)[0] == 1
    thread.join()


def test_a_killed_daemon_ends_a_blocked_call(own_daemon, job):
    session = attach(own_daemon.socket, job, 0, 2)
    write_all(session, torch.float32)
    weights = torch.from_dlpack(session.weights(0))
    before = session.counters()["commands"]

    def kill():
        wait_until(lambda: session.counters()["commands"] != before)
        own_daemon.process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(core.UnavailableError) as caught:
        session.step(1, HYPER, 0.0, b"", float("inf"))
    thread.join()
    assert caught.value.code == "E_DAEMON_GONE" and caught.value.retryable
    assert torch.equal(weights[:57], initial(session, 0, torch.float32))


def test_a_forked_child_is_refused_and_ends_in_good_order(core_node, job):
    result = run_script(
        core_node,
        f"""
        import os
        session = attach(socket, {job!r})
        write_all(session, torch.float32)
        weights = torch.from_dlpack(session.weights(1))
        child = os.fork()
        if child == 0:
            try:
                session.fetch(0)
            except core.UsageError as error:
                ok = error.code == "E_FORKED" and weights[0] == -1
            sys.exit(0 if ok else 1)  # through the interpreter's own tear-down
        assert os.waitpid(child, 0)[1] == 0
        session.release(session.fetch(0))
        session.step(1, HYPER)
        print("done")
        """,
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_a_write_into_the_weights_is_explained(core_node, job):
    result = run_script(
        core_node,
        f"""
        session = attach(socket, {job!r})
        write_all(session, torch.float32)
        torch.from_dlpack(session.weights(0))[52] = 1
        """,
    )
    assert result.returncode == -signal.SIGSEGV
    assert f"weights of job {job}: parameter w, element 2 (group 0, embed)" in result.stderr
    assert "hint: " in result.stderr

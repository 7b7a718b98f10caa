# SPDX-License-Identifier: Apache-2.0
"""Goal    After the daemon's death every call of the extension and of an attached model is
        E_DAEMON_GONE with a hint, a new connection E_NO_DAEMON; a new daemon on the same socket trains.
Method  The real daemon, killed. Each call has a session or model of its own, in which it is the
        first after the death.
"""

import pytest
import torch
from core_daemon import HYPER, Daemon, attach, core, write_all

CALLS = {
    "write_initial": lambda s, lease: s.write_initial(0, torch.zeros(57)),
    "initial_done": lambda s, lease: s.initial_done(),
    "fetch": lambda s, lease: s.fetch(1),
    "release": lambda s, lease: s.release(lease),
    "grad_slot": lambda s, lease: s.grad_slot(1),
    "grad_ready": lambda s, lease: s.grad_ready(0),
    "drop_gradients": lambda s, lease: s.drop_gradients(),
    "step": lambda s, lease: s.step(1, HYPER),
    "read_state": lambda s, lease: s.read_state("embed", "exp_avg", 0, 8),
    "detach": lambda s, lease: s.detach(),
}


def gone(call, code="E_DAEMON_GONE"):
    with pytest.raises(core.UnavailableError) as caught:
        call()
    error = caught.value
    assert error.code == code and error.retryable and error.hint, error
    assert str(error).startswith(f"error[{code}]: ")


@pytest.fixture
def killed(own_daemon):
    """Kills the daemon when called; at the end another one on the same socket trains."""

    def kill():
        own_daemon.process.kill()
        own_daemon.process.wait(30)

    yield kill
    again = Daemon(own_daemon.folder)
    try:
        session = attach(again.socket, "again")
        write_all(session, torch.float32)
        torch.from_dlpack(session.grad_slot(0)).fill_(1)
        session.grad_ready(0)
        assert session.step(1, HYPER)[0] == 1
        session.detach()
    finally:
        again.stop()


def test_each_call_of_the_extension(own_daemon, killed):
    sessions = {}
    for name in CALLS:
        session, lease = attach(own_daemon.socket, name), None
        if name not in ("write_initial", "initial_done"):
            write_all(session, torch.float32)
            lease = session.fetch(0)
            session.grad_slot(0)
        sessions[name] = session, lease
    killed()
    for name, (session, lease) in sessions.items():
        gone(lambda: CALLS[name](session, lease))
    gone(lambda: attach(own_daemon.socket, "new"), "E_NO_DAEMON")
    gone(lambda: core.status(own_daemon.socket), "E_NO_DAEMON")
    gone(lambda: core.trace(own_daemon.socket, "step"), "E_NO_DAEMON")
    gone(lambda: core.delete_job(own_daemon.socket, "step"), "E_NO_DAEMON")


def test_each_use_of_an_attached_model(own_daemon, killed, monkeypatch):
    import forebay
    from models import batch, loss_of, net

    monkeypatch.setattr(forebay, "_core", core, raising=False)
    uses = {
        "forward": lambda model, opt, loss: loss_of(model, batch(2)),
        "backward": lambda model, opt, loss: loss.backward(),
        "step": lambda model, opt, loss: opt.step(),
        "read_state": lambda model, opt, loss: opt.read_state("norm.weight"),
        "state_sha256": lambda model, opt, loss: opt.state_sha256(),
        "detach": lambda model, opt, loss: opt.detach(),
    }
    models = {}
    for name in uses:
        model = net()
        opt = forebay.attach(model, socket=own_daemon.socket, job=name, timeout=30)
        models[name] = model, opt, loss_of(model, batch(1))
    killed()
    for name, (model, opt, loss) in models.items():
        gone(lambda: uses[name](model, opt, loss))
        assert "Parameter containing" in repr(model.norm.weight), "the window can still be read"
        if name != "detach":
            gone(opt.detach)
        model.half()  # works: the model is a plain one again
    gone(lambda: forebay.status(own_daemon.socket), "E_NO_DAEMON")

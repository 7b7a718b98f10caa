# SPDX-License-Identifier: Apache-2.0
"""Goal    Who may not reach a daemon on another node is refused with an error that says why and what helps, and nobody
        else notices; a gateway whose settings let anybody in does not start.
Method  As test_remote.py.
"""

import pathlib
import shutil
import subprocess

import forebay
import pytest
import remote_gateway
import remote_ranks
import torch
from network_nodes import ADDRESSES, LINK
from remote_gateway import GATEWAY, PORT, PRINCIPAL, UID, Authority, Gateway, make_client_folder
from test_remote import DEADLINE_S, Place, errors

TOKEN = "0123456789abcdef0123456789abcdef"
QUOTA = "64MiB"
SHIFTED_CLOCK = GATEWAY.parents[1] / "tests" / "libshifted_clock.so"
V6 = ("fd00:77::1", "fd00:77::2")


@pytest.fixture(scope="module")
def place(gateway_network, tmp_path_factory):
    made = Place(gateway_network, tmp_path_factory.mktemp("place"), f"dram.uid_quota={QUOTA}")
    yield made
    made.stop()


def refusal(place, *words, **environment):
    """(id, text) of the error that a rank meets at attach."""
    [error] = errors(place.ranks(*(words or ("refused", 1, 1)), **environment))
    return error[2:]


def test_a_certificate_that_has_expired_is_refused(place):
    certificate, key = place.authority.issue("expired", days=-1)
    code, text = refusal(place, client=make_client_folder(place.folder / "expired", place.authority, certificate, key))
    assert code == "E_CONFIG" and "expired/cert.pem: is valid from" in text and "to 2020-01-02 00:00:00 UTC" in text
    # The gateway refuses the certificate too.
    own = ["-cert", certificate, "-key", key, "-connect", f"{ADDRESSES[0]}:{PORT}", "-tls1_2"]
    command = place.nodes[1].command("openssl", "s_client", *own, folder=place.folder)
    said = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "certificate expired" in said.stderr
    assert "certificate verify failed" in place.gateway.text()


def test_a_gateway_whose_certificate_has_expired_does_not_start(place):
    certificate, key = place.authority.issue("old-gateway", ["worker-0"], days=-1)
    settings = place.folder / "old.toml"
    text = remote_gateway.settings_text(f"{ADDRESSES[0]}:{PORT + 4}", "/s", certificate, key, place.authority)
    settings.write_text(text, encoding="ascii")
    for flag in ([], ["--check"]):
        command = [GATEWAY, "--config", settings, *flag]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 1 and "E_CONFIG" in done.stderr and f"{certificate}: is valid from" in done.stderr


@pytest.mark.parametrize("shift_s", [3600, -3600])
def test_clocks_that_differ_by_an_hour_matter_to_certificates_alone(place, tmp_path, shift_s):
    """Those of here begin with the test."""
    shift = tmp_path / "shift"
    shift.write_text(str(shift_s), encoding="ascii")
    clock = {"LD_PRELOAD": str(SHIFTED_CLOCK), "FOREBAY_TEST_CLOCK": str(shift)}
    if shift_s > 0:
        assert not errors(place.ranks(f"clock{shift_s}", 2, 2, **clock))
    else:
        code, text = refusal(place, **clock)
        assert code == "E_CONFIG" and "ca.pem: is valid from" in text and "set the clocks" in text


def test_a_certificate_of_another_authority_is_refused(place):
    other = Authority(place.folder / "other", "other-ca")
    folder = make_client_folder(place.folder / "stranger", place.authority, *other.issue(PRINCIPAL))
    code, text = refusal(place, client=folder)
    assert code == "E_PERMISSION" and "tls.client_ca" in text
    assert "certificate verify failed" in place.gateway.text()


def test_a_gateway_of_another_authority_is_refused(place):
    other = Authority(place.folder / "elsewhere", "other-ca")
    folder = make_client_folder(place.folder / "believes", other, *place.authority.issue(PRINCIPAL))
    code, text = refusal(place, client=folder)
    assert code == "E_PERMISSION" and "ca.pem" in text


def test_a_gateway_of_another_name_is_refused(place):
    code, text = refusal(place, address=f"ucx://[::ffff:{ADDRESSES[0]}]:{PORT}")
    assert code == "E_PERMISSION" and "name the host" in text


def test_a_name_without_a_principal_is_refused(place):
    certificate = place.authority.issue("nobody")
    code, text = refusal(place, client=make_client_folder(place.folder / "nobody", place.authority, *certificate))
    assert code == "E_PERMISSION" and "[principal.nobody]" in text


def test_what_others_can_read_is_no_secret(place):
    folder = place.folder / "open"
    shutil.copytree(place.client, folder)
    (folder / "key.pem").chmod(0o644)
    code, text = refusal(place, client=folder)
    assert code == "E_CONFIG" and f"chmod 600 {folder}/key.pem" in text


def test_a_folder_without_credentials_is_named(place):
    code, text = refusal(place, client=place.folder / "nothing")
    assert code == "E_CONFIG" and "nothing/ca.pem" in text


def test_a_job_larger_than_the_principals_quota_is_refused(place):
    code, text = refusal(place, "large", 1, 1, "wide=2048")
    assert code == "E_DRAM_LIMIT" and f"user {UID}" in text and "64.0 MiB" in text


def test_nobody_there_is_named(place):
    code, text = refusal(place, address=f"ucx://{ADDRESSES[0]}:{PORT + 1}")
    assert code == "E_NO_DAEMON" and f"{ADDRESSES[0]}:{PORT + 1}" in text


@pytest.mark.parametrize(
    "address",
    ["", "one", "one:", f":{PORT}", "one:0", "one:70000", f"one: {PORT}", f"one:+{PORT}", f"[]:{PORT}", f"{V6[0]}:{PORT}"],
)
def test_an_address_that_is_not_a_host_and_a_port_is_refused(address):
    with pytest.raises(forebay.ForebayError, match=r"ucx://HOST:PORT") as refused:
        forebay.attach(torch.nn.Linear(2, 2), socket=f"ucx://{address}")
    assert refused.value.code == "E_OPTION" and f"ucx://{address} " in str(refused.value)


def test_a_socket_that_is_no_gateway_is_refused(place):
    # A process on the daemon's node listens at the port, and speaks no TLS.
    script = "import socket; s = socket.create_server(('', 7799)); print('listens', flush=True); s.accept()[0].sendall(b'220 mail\\r\\n' * 9)"
    command = place.nodes[0].command("python3", "-c", script)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "listens\n"
        code, text = refusal(place, address=f"ucx://{ADDRESSES[0]}:7799")
        server.kill()
    assert code == "E_PERMISSION" and "TLS" in text


# ---------------------------------------- UCX is missing or too old


def _library(folder, name, code):
    folder.mkdir()
    source = folder / "library.c"
    source.write_text(code, encoding="ascii")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / name, source], check=True)
    return folder / name


def test_without_ucx_the_package_to_install_is_named(place, tmp_path):
    (tmp_path / "libucp.so.0").touch()
    code, text = refusal(place, LD_LIBRARY_PATH=str(tmp_path))
    assert code == "E_UNSUPPORTED" and "libucp.so.0" in text and "apt install libucx0" in text


def test_a_ucx_without_what_is_called_is_refused(place, tmp_path):
    library = _library(tmp_path / "none", "libucp.so.0", "int nothing;")
    code, text = refusal(place, LD_LIBRARY_PATH=str(library.parent))
    assert code == "E_UNSUPPORTED" and "ucp_" in text and "apt install libucx0" in text


def test_a_ucx_that_is_too_old_is_named_with_both_versions(place, tmp_path):
    old = "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 12; *c = 1; }"
    library = _library(tmp_path / "old", "old.so", old)
    code, text = refusal(place, LD_PRELOAD=str(library))
    assert code == "E_UNSUPPORTED" and "1.12" in text and "1.13" in text


def test_without_the_program_the_variable_is_named(place):
    code, text = refusal(place, FOREBAY_GATEWAY="/nowhere/forebay-gateway")
    assert code == "E_UNSUPPORTED" and "/nowhere/forebay-gateway" in text and "FOREBAY_GATEWAY" in text


def test_a_program_that_ends_by_itself_says_how(place):
    code, text = refusal(place, FOREBAY_GATEWAY="/bin/false")
    assert code == "E_REMOTE" and "the gateway ended with status 1" in text


def test_too_few_descriptors_are_named_and_harm_nobody(place, tmp_path):
    """UCX aborts at the peer of one that runs out of them in the middle."""
    program = tmp_path / "few"
    program.write_text(f'#!/bin/sh\nulimit -n 45\nexec {GATEWAY} "$@"\n', encoding="ascii")
    program.chmod(0o755)
    code, text = refusal(place, FOREBAY_GATEWAY=str(program))
    assert code == "E_LIMIT" and "of the 40 that a session" in text and "ulimit -n" in text
    assert place.gateway.process.poll() is None


# ---------------------------------------- other ways in


def test_a_token_is_enough_where_the_gateway_has_tokens(place, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# who may\n{PRINCIPAL} {TOKEN}\n", encoding="ascii")
    tokens.chmod(0o600)
    text = place.settings(bind=f"{ADDRESSES[0]}:{PORT + 2}", tokens=tokens)
    gateway = Gateway(tmp_path, text, place.nodes[0].command())
    address = f"ucx://{ADDRESSES[0]}:{PORT + 2}"
    folder = make_client_folder(tmp_path / "right", place.authority, token=TOKEN)
    assert not errors(place.ranks("token", 1, 2, address=address, client=folder))
    wrong = make_client_folder(tmp_path / "wrong", place.authority, token=TOKEN[::-1])
    code, said = refusal(place, address=address, client=wrong)
    assert code == "E_PERMISSION" and "nobody's" in said
    (folder / "token").chmod(0o640)
    code, said = refusal(place, address=address, client=folder)
    assert code == "E_CONFIG" and "chmod 600" in said
    gateway.stop()


def test_ipv6_and_links_of_two_sizes(place, tmp_path):
    for node, address, mtu in zip(place.nodes, V6, (1500, 9000)):
        node.run("ip", "addr", "add", f"{address}/64", "dev", LINK, "nodad")
        node.run("ip", "link", "set", "dev", LINK, "mtu", mtu)
    own = place.authority.issue("gateway6", [V6[0]])
    bind = f"[{V6[0]}]:{PORT + 3}"
    text = remote_gateway.settings_text(bind, place.daemon.socket, *own, place.authority)
    gateway = Gateway(tmp_path, text, place.nodes[0].command())
    lines = place.ranks("v6", 1, 3, "wide=256", address=f"ucx://{bind}")
    gateway.stop()
    assert not errors(lines)
    assert sum(line[0] == "digest" for line in lines) == 1


# ---------------------------------------- settings


def checked(folder, text):
    settings = folder / "gateway.toml"
    settings.write_text(text, encoding="utf-8")
    done = subprocess.run([GATEWAY, "--config", settings, "--check"], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("bind =", "bound =", ":1: unknown key bound"),
        ('bind = "', '# "', "bind is not set"),
        ("client_ca", "# client_ca", "neither tls.client_ca and tokens say who may connect"),
        ("[principal.trainer]", "[principal.trainer]\nquota = 3", "unknown key principal.trainer.quota"),
        ("uid = 2001", "uid = 0", "principal.trainer.uid: is not a number from 1"),
        ('rma = "auto"', 'rma = "maybe"', "ucx.rma: is none of auto, on, off"),
        ("keepalive = 10000", "keepalive = 1", "keepalive: is not a number from 500"),
        ("[daemon]", "[daemon", "gateway.toml:4: "),
        ("session_wait = 60000", "session_wait = -1", "session_wait: is not a number from 0"),
    ],
)
def test_settings_that_are_wrong_are_named_with_their_line(place, tmp_path, old, new, said):
    text = place.settings()
    assert old in text
    code, error = checked(tmp_path, text.replace(old, new))
    assert code == 1 and error.startswith("error[E_CONFIG]") and said in error


def test_a_key_of_the_gateway_that_others_can_read_is_refused(place, tmp_path):
    certificate, key = place.authority.issue("loose")
    pathlib.Path(key).chmod(0o644)
    text = place.settings().replace(str(place.own[1]), str(key)).replace(str(place.own[0]), str(certificate))
    code, error = checked(tmp_path, text)
    assert code == 1 and f"chmod 600 {key}" in error


def test_it_says_its_name_and_release(gateway_network):
    done = subprocess.run([GATEWAY, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"forebay-gateway {forebay.__version__}\n"


def test_settings_that_are_right_are_so(place, tmp_path):
    assert checked(tmp_path, place.settings()) == (0, "")


def test_after_all_of_it_ranks_train(place):
    assert not errors(place.start(remote_ranks.main, "after", 2, 3).wait(60))

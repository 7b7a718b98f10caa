# SPDX-License-Identifier: Apache-2.0
"""A forebay-gateway of the tests' own, beside a daemon, and the certificates that it and its clients show."""

import os
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
GATEWAY = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build" / "bin")) / "forebay-gateway"
DEADLINE_S = 30
PORT = 7700
UID = 2001
PRINCIPAL = "trainer"


def missing():
    """Why a gateway is impossible here; empty if it is possible."""
    return "" if GATEWAY.exists() else f"{GATEWAY} is not built: it needs libucx-dev and libssl-dev"


class Authority:
    """Signs certificates. Its own is `certificate`."""

    def __init__(self, folder, name="forebay-ca"):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.key, self.certificate = self.folder / "ca.key", self.folder / "ca.pem"
        self._openssl("req", "-x509", *self._new_key(self.key), "-days", 30, "-subj", f"/CN={name}", "-out", self.certificate)

    def issue(self, name, hosts=(), days=30):
        """(certificate, key) of a name; `days` below 0: expired."""
        key, request, certificate = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        names = ",".join(f"DNS:{host}" for host in hosts)
        extension = ["-addext", f"subjectAltName={names}"] if hosts else []
        self._openssl("req", *self._new_key(key), "-subj", f"/CN={name}", *extension, "-out", request)
        # `x509` cannot issue an expired certificate: _sign_expired() uses `ca`.
        span = ["-days", days] if days > 0 else ["-not_before", "20200101000000Z", "-not_after", "20200102000000Z"]
        if days > 0:
            sign = ["x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.key, "-CAcreateserial"]
            self._openssl(*sign, *span, "-copy_extensions", "copy", "-out", certificate)
        else:
            self._sign_expired(request, certificate)
        key.chmod(0o600)
        return certificate, key

    def _sign_expired(self, request, certificate):
        database = self.folder / "index.txt"
        database.write_text("", encoding="ascii")
        (self.folder / "serial").write_text("01\n", encoding="ascii")
        settings = self.folder / "ca.cnf"
        settings.write_text(
            f"[ca]\ndefault_ca=own\n[own]\ndatabase={database}\nserial={self.folder / 'serial'}\n"
            f"new_certs_dir={self.folder}\ndefault_md=sha256\npolicy=any\ncopy_extensions=copy\n[any]\ncommonName=supplied\n",
            encoding="ascii",
        )
        dates = ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]
        own = ["-cert", self.certificate, "-keyfile", self.key]
        self._openssl("ca", "-batch", "-config", settings, *own, *dates, "-in", request, "-out", certificate, "-notext")

    @staticmethod
    def _new_key(path):
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path]

    @staticmethod
    def _openssl(*words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=DEADLINE_S)


def make_client_folder(folder, authority, certificate=None, key=None, token=None):
    """What FOREBAY_REMOTE names."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.pem").write_bytes(authority.certificate.read_bytes())
    if certificate:
        (folder / "cert.pem").write_bytes(certificate.read_bytes())
        (folder / "key.pem").write_bytes(key.read_bytes())
        (folder / "key.pem").chmod(0o600)
    if token:
        (folder / "token").write_text(token + "\n", encoding="ascii")
        (folder / "token").chmod(0o600)
    return folder


def settings_text(bind, daemon_socket, certificate, key, authority, **more):
    """A gateway.toml: with certificates of `authority` for clients, or with `tokens`."""
    lines = [f'bind = "{bind}"']
    lines += [f"keepalive = {more.get('keepalive', 10000)}", f"session_wait = {more.get('session_wait', 60000)}"]
    if "tokens" in more:
        lines += [f'tokens = "{more["tokens"]}"']
    lines += ["[daemon]", f'socket = "{daemon_socket}"', "[tls]", f'certificate = "{certificate}"', f'key = "{key}"']
    if "tokens" not in more:
        lines += [f'client_ca = "{authority.certificate}"']
    lines += ["[ucx]", f'tls = "{more.get("ucx_tls", "tcp")}"', f'rma = "{more.get("rma", "auto")}"']
    for name, uid in more.get("principals", {PRINCIPAL: UID}).items():
        lines += [f"[principal.{name}]", f"uid = {uid}"]
    return "\n".join(lines) + "\n"


class Gateway:
    """The service, until stop()."""

    def __init__(self, folder, text, launcher=()):
        self.folder, self.launcher = pathlib.Path(folder), list(map(str, launcher))
        self.settings, self.log = self.folder / "gateway.toml", self.folder / "gateway.log"
        self.settings.write_text(text, encoding="utf-8")
        self.start()

    def start(self):
        with self.log.open("wb") as log:
            command = [*self.launcher, str(GATEWAY), "--config", str(self.settings)]
            # Tests stop this process. If its group were orphaned, the kernel would continue the process.
            self.process = subprocess.Popen(
                command, stderr=log, stdout=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        end = time.monotonic() + DEADLINE_S
        while b"forebay-gateway ready" not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"forebay-gateway did not start: {self.text()}")
            time.sleep(0.01)  # house: allow sleep: a poll with a deadline

    def text(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0, self.text()

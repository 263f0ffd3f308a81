"""A small HTTPS server of the loopback: a webhook of the cluster, or what stands in for an API server that is ill."""

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from podwire.kernel import spawn
from podwire.lab.kubernetes.certificates import Authority, Pair

Answer = Callable[[str, Any], tuple[int, Mapping[str, Any]]]
"""Gives status and document, by path and body of a request."""
_TIME: Final = "%y%m%d%H%M%SZ"
_CA: Final = """
[own]
database = {directory}/index.txt
new_certs_dir = {directory}
rand_serial = yes
default_md = sha256
policy = names
x509_extensions = extensions
[names]
commonName = supplied
[req]
distinguished_name = subject
prompt = no
[subject]
CN = shifted
[extensions]
subjectAltName = IP:127.0.0.1
extendedKeyUsage = serverAuth
"""


@contextmanager
def serving(pair: Pair, answer: Answer, port: int = 0) -> Iterator[int]:
    """Serve on a port, which is given, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"
        """Of a connection for each request: none outlives the server."""

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, document = answer(self.path, json.loads(body) if body[:1] == b"{" else None)
            text = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

        def log_message(self, *_words: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_words: object) -> None:
            """Say nothing of clients that do not trust this server."""

    with Server(("127.0.0.1", port), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        # The handshake is done by the thread of the connection: a client that goes away must not end the server.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def refuse_all(status: int, reason: str) -> Answer:
    """Answer as an API server that carries out nothing."""
    said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    return lambda _path, _body: (status, {**said, "reason": reason, "message": f"ill: {reason}"})


def deny(message: str) -> Answer:
    """Answer as a webhook that lets nothing pass."""

    def review(_path: str, body: Any) -> tuple[int, Mapping[str, Any]]:
        said = {"uid": body["request"]["uid"], "allowed": False, "status": {"message": message}}
        kind = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        return 200, {**kind, "response": said}

    return review


def issue_shifted(authority: Authority, directory: Path, begins_in: timedelta) -> Pair:
    """Give a server's certificate that is valid for a day from some time on, which may be another than now."""
    directory.mkdir()
    (directory / "index.txt").touch()
    config = directory / "ca.cnf"
    config.write_text(_CA.format(directory=directory))
    pair = Pair(directory / "shifted.crt", authority.make_signing_key("shifted"))
    request = directory / "shifted.csr"
    begin = datetime.now(UTC) + begins_in
    _run("req", "-new", "-config", str(config), "-key", str(pair.key), "-out", str(request))
    _run(
        *("ca", "-batch", "-notext", "-config", str(config), "-name", "own"),
        *("-cert", str(authority.certificate), "-keyfile", str(authority.key)),
        *("-startdate", begin.strftime(_TIME)),
        *("-enddate", (begin + timedelta(days=1)).strftime(_TIME)),
        *("-in", str(request), "-out", str(pair.certificate)),
    )
    return pair


def sign_token(key: Path, claims: Mapping[str, Any]) -> str:
    """Give a token as the API server signs it for a service account (RFC 7515, ES256)."""
    header = {"alg": "ES256", "typ": "JWT"}
    text = ".".join(_encode(json.dumps(part).encode()) for part in (header, claims))
    der = _run("dgst", "-sha256", "-sign", str(key), input_bytes=text.encode())
    return f"{text}.{_encode(_join_numbers(der))}"


def _join_numbers(der: bytes) -> bytes:
    """Give both numbers of a signature, of 32 bytes each: a sequence of two short integers (X.690)."""
    first_end = 4 + der[3]
    numbers = (der[4:first_end], der[first_end + 2 :])
    return b"".join(number[-32:].rjust(32, b"\0") for number in numbers)


def _encode(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def _run(*arguments: str, input_bytes: bytes = b"") -> bytes:
    done = spawn.run(["openssl", *arguments], input_bytes=input_bytes, timeout_s=60)
    assert done.status == 0, done.stderr.decode()
    return done.stdout

"""An etcd and a kube-apiserver with all they need: certificates, users, and a log of every request.

Used alone by tests of whatever speaks to the API (`started(directory)`), and as the heart of a cluster. Both
keep their files below one directory, so each can be killed and started again with what it had. The API server can be
made silent (`freeze`), absent (`kill`) or forgetful (`compact`).
"""

import contextlib
import json
import secrets
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from podwire.kernel import netns
from podwire.lab import ports
from podwire.lab.kubernetes import programs
from podwire.lab.kubernetes.certificates import Authority
from podwire.lab.kubernetes.client import ApiClient
from podwire.lab.kubernetes.daemon import Daemon, Place

ADMIN: Final = "admin"
ADMINS: Final = "system:masters"
SERVICE_CIDR: Final = "10.96.0.0/16"
SERVICE_ADDRESS: Final = "10.96.0.1"
_LOOPBACK: Final = "127.0.0.1"
_AUDIT_POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True)
class User:
    """A user that the API server knows by a token."""

    name: str
    groups: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_hex(16))


@dataclass(frozen=True)
class Shape:
    """Where the API server is reached, and what else it is told."""

    address: str = _LOOPBACK
    port: int = 0
    """0: a free one."""
    names: tuple[str, ...] = ("localhost", "kubernetes", "kubernetes.default.svc")
    flags: tuple[str, ...] = ()
    """Further ones of kube-apiserver's command line; the last one of a name counts."""
    network: str | None = None
    """Path of the network namespace that both run in; None = where we are."""
    etcd: str = ""
    """Path of the etcd to use; empty: the distribution's."""


ON_LOOPBACK: Final = Shape()


class ApiServer:
    """One kube-apiserver with its own etcd; `users` beside `admin` are known by token."""

    def __init__(
        self, directory: Path, users: Sequence[User] = (), shape: Shape = ON_LOOPBACK
    ) -> None:
        paths = programs.find(programs.API_SERVER)
        self.directory = directory
        self.shape = shape
        self.port = shape.port or ports.claim()
        self.users = {user.name: user for user in (User(ADMIN, (ADMINS,)), *users)}
        self.authority = Authority(directory / "pki")
        self.audit_log = directory / "audit.log"
        self._etcd_port, self._peer_port = ports.claim(), ports.claim()
        place = Place(network=shape.network)
        self.etcd = Daemon("etcd", self._etcd_command(), directory / "etcd.log", place=place)
        self.server = Daemon(
            "kube-apiserver",
            self._command(paths["kube-apiserver"]),
            directory / "kube-apiserver.log",
            place=place,
        )
        self.client = self.client_of(ADMIN)

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"https://{self.shape.address}:{self.port}"

    @property
    def ca(self) -> Path:
        """The certificate of the authority that signed its own."""
        return self.authority.certificate

    @property
    def admin_token(self) -> str:
        """The token of the user who may do anything."""
        return self.users[ADMIN].token

    def release_ports(self) -> None:
        """Let other servers have its ports: it is not started again."""
        ports.release(self.port, self._etcd_port, self._peer_port)

    def client_of(self, user: str) -> ApiClient:
        """Give a way in for one of the users."""
        return ApiClient(
            self.shape.address,
            self.port,
            ca=self.ca,
            token=self.users[user].token,
            network=self.shape.network,
        )

    def start(self) -> None:
        """Start what does not run, and wait until the API server is ready."""
        self.etcd.start(self._etcd_answers)
        self.server.start(self._is_ready)

    def stop(self) -> None:
        """End both; their files stay."""
        self.server.stop()
        self.etcd.stop()

    def kill(self) -> None:
        """End the API server without warning; etcd runs on. `start` brings it back."""
        self.server.kill()

    def freeze(self) -> None:
        """Let the API server answer nobody, and keep its connections; `thaw` ends that."""
        self.server.freeze()

    def thaw(self) -> None:
        """Let the API server go on."""
        self.server.thaw()

    def compact(self) -> None:
        """Let etcd forget all revisions but the present one: a client that resumes an older watch is told 410."""
        status = self._ask_etcd("kv/range", {"key": "AA=="})
        revision = status["header"]["revision"]
        self._ask_etcd("kv/compaction", {"revision": revision, "physical": True})

    def write_kubeconfig(
        self, path: Path, user: str = ADMIN, *, with_certificate: bool = False
    ) -> Path:
        """Write a kubeconfig that has all inside; with a certificate `user` need not be one of the users."""
        if with_certificate:
            known = self.users.get(user)
            pair = self.authority.issue_client(user, user, known.groups if known else ())
            credentials = {
                "client-certificate": str(pair.certificate),
                "client-key": str(pair.key),
            }
        else:
            credentials = {"token": self.users[user].token}
        return write_kubeconfig(path, self.url, self.ca, user, credentials)

    def read_audit(self, user: str | None = None) -> list[dict[str, Any]]:
        """Read what was asked, finished or begun (watches are in it twice), by one user or by all."""
        if not self.audit_log.exists():
            return []
        # The last line may be half written.
        whole, _, _ = self.audit_log.read_text(errors="replace").rpartition("\n")
        events = [json.loads(line) for line in whole.splitlines() if line.endswith("}")]
        return [event for event in events if user in (None, event["user"].get("username"))]

    def _is_ready(self) -> bool:
        # Beside what makes it ready it makes the first namespaces; this one comes last.
        return self.client.answers("/readyz") and self.client.answers("/api/v1/namespaces/default")

    def _etcd_answers(self) -> bool:
        try:
            return bool(self._ask_etcd("kv/range", {"key": "AA=="}))
        except (OSError, ValueError):
            return False

    def _ask_etcd(self, path: str, body: Mapping[str, Any]) -> Any:
        def ask() -> Any:
            request = urllib.request.Request(
                f"{self._etcd_url}/v3/{path}", json.dumps(body).encode()
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)

        return ask() if self.shape.network is None else netns.run_at(self.shape.network, ask)

    @property
    def _etcd_url(self) -> str:
        return f"http://{_LOOPBACK}:{self._etcd_port}"

    def _etcd_command(self) -> list[str]:
        peers = f"http://{_LOOPBACK}:{self._peer_port}"
        return [
            *(self.shape.etcd or programs.find_etcd(), "--name", "one"),
            *("--data-dir", str(self.directory / "etcd")),
            *("--listen-client-urls", self._etcd_url, "--advertise-client-urls", self._etcd_url),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"one={peers}", "--logger", "zap"),
        ]

    def _command(self, program: str) -> list[str]:
        hosts = dict.fromkeys([self.shape.address, _LOOPBACK, SERVICE_ADDRESS, *self.shape.names])
        server = self.authority.issue_server("kube-apiserver", list(hosts))
        kubelet = self.authority.issue_client("kube-apiserver-kubelet", "kube-apiserver", [ADMINS])
        signing = self.authority.make_signing_key("service-accounts")
        return [
            program,
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={self.shape.address}",
            f"--advertise-address={self.shape.address}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={server.certificate}",
            f"--tls-private-key-file={server.key}",
            f"--client-ca-file={self.ca}",
            f"--token-auth-file={self._write_tokens()}",
            f"--service-account-issuer={self.url}",
            f"--service-account-key-file={signing}",
            f"--service-account-signing-key-file={signing}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--profiling=false",
            f"--kubelet-client-certificate={kubelet.certificate}",
            f"--kubelet-client-key={kubelet.key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--audit-policy-file={self._write_audit_policy()}",
            f"--audit-log-path={self.audit_log}",
            *self.shape.flags,
        ]

    def _write_tokens(self) -> Path:
        path = self.directory / "tokens.csv"
        lines = []
        for user in self.users.values():
            groups = f',"{",".join(user.groups)}"' if user.groups else ""
            lines.append(f"{user.token},{user.name},{user.name}{groups}\n")
        path.write_text("".join(lines))
        path.chmod(0o600)
        return path

    def _write_audit_policy(self) -> Path:
        path = self.directory / "audit-policy.json"
        path.write_text(json.dumps(_AUDIT_POLICY))
        return path


def write_kubeconfig(
    path: Path, url: str, ca: Path, user: str, credentials: Mapping[str, str]
) -> Path:
    """Write a kubeconfig of one cluster and one user; JSON is YAML, too."""
    name = "cluster"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": url, "certificate-authority": str(ca)}}],
        "users": [{"name": user, "user": dict(credentials)}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
        "current-context": name,
    }
    path.write_text(json.dumps(document, indent=1))
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def started(
    directory: Path, users: Sequence[User] = (), shape: Shape = ON_LOOPBACK
) -> Iterator[ApiServer]:
    """Give an API server that runs and is ended afterwards, also when its start failed."""
    server = ApiServer(directory, users, shape)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.release_ports()

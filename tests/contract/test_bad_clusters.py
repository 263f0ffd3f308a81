"""What can be wrong with a cluster: each is named in status, log and, where that can be written, in an Event with what
to do; and when it is put right everything is published, without a restart.
"""

import base64
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from msgspec.structs import replace

from podwire.agent.duties.kubernetes import event_writer
from podwire.agent.duties.kubernetes.event_writer import open_events
from podwire.agent.duties.kubernetes.start import Start
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.control.cluster.facts import node_key
from podwire.control.cluster.published import endpoints_key
from podwire.control.kubernetes import event_queue
from podwire.lab.kubernetes.api_server import ApiServer, User
from podwire.lab.kubernetes.client import ApiClient, Refused
from podwire.model.errors import Unavailable
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.store import KubernetesStore
from podwire.store.open import describe_clock, find_event_writer
from tests.contract import api_rig, https_rig, kubernetes_rig
from tests.contract.node_lives import Agent, Cluster
from tests.contract.test_node_in_kubernetes import AGENT, PATHS, give_rights
from tests.fakes.node import FakeClock
from tests.unit.test_cluster_duty import Facts
from tests.waiting import DEADLINE_S, ask_until

EVENT_S: Final = 2 * event_queue.REPEAT_S + DEADLINE_S
DEFINITION: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodes.podwire.io"
ROLE: Final = f"{PATHS['ClusterRole']}/podwire-agent"
ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
PUBLISHED: Final = {
    "apiGroups": ["podwire.io"],
    "apiVersions": ["*"],
    "operations": ["CREATE", "UPDATE"],
    "resources": ["nodes"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with the CRDs and the manifest's rights."""
    with api_rig.started(tmp_path_factory.mktemp("bad"), [User(AGENT)]) as made:
        kubernetes_rig.install_crds(made)
        give_rights(made)
        yield made


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(server, tmp_path, AGENT)
    made.add_node("n1", "10.244.5.0/24")
    yield made
    made.close()
    made.clean()


def definition() -> dict[str, Any]:
    path = kubernetes_rig.CRDS / "nodes.yaml"
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def spec_of(crd: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema: dict[str, Any] = found["spec"]
    return schema


def put_definition(admin: ApiClient, crd: dict[str, Any]) -> None:
    with suppress(Refused):
        admin.delete(DEFINITION)
    ask_until(lambda: not admin.answers(DEFINITION), "the end of the CRD")
    admin.create(DEFINITION.rpartition("/")[0], crd)
    ask_until(lambda: admin.answers("/apis/podwire.io/v1/nodes"), "the CRD")


# What is broken, each with its repair


def lack_a_verb(server: ApiServer) -> Callable[[], object]:
    role = server.client.get(ROLE)
    less = copy.deepcopy(role)
    for rule in less["rules"]:
        if rule["apiGroups"] == ["podwire.io"] and "nodes" in rule["resources"]:
            rule["verbs"].remove("create")
    server.client.patch(ROLE, {"rules": less["rules"]})
    # An agent that is faster than the news writes what it has to, and nothing is wrong.
    ask_until(lambda: not can_write(server.client_of(AGENT)), "the role")
    return lambda: server.client.patch(ROLE, {"rules": role["rules"]})


def lack_the_definition(server: ApiServer) -> Callable[[], object]:
    server.client.delete(DEFINITION)
    ask_until(lambda: not server.client.answers("/apis/podwire.io/v1/nodes"), "the end of the kind")
    return lambda: put_definition(server.client, definition())


def have_an_older_definition(server: ApiServer) -> Callable[[], object]:
    old = definition()
    del spec_of(old)["properties"]["claims"]
    put_definition(server.client, old)
    return lambda: put_definition(server.client, definition())


def have_a_newer_definition(server: ApiServer) -> Callable[[], object]:
    new = definition()
    spec_of(new)["properties"]["pledge"] = {"type": "string"}
    spec_of(new)["required"] = ["pledge"]
    put_definition(server.client, new)
    return lambda: put_definition(server.client, definition())


def have_a_dead_webhook(server: ApiServer) -> Callable[[], object]:
    path = f"{ADMISSION}/validatingwebhookconfigurations"
    hook = {
        "name": "dead.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [PUBLISHED],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    server.client.create(path, {"metadata": {"name": "dead"}, "webhooks": [hook]})
    ask_until(lambda: not can_write(server.client), "the webhook")
    return lambda: server.client.delete(f"{path}/dead")


def can_write(client: ApiClient) -> bool:
    """Tell whether a Node of podwire's could be written."""
    trial = {"metadata": {"name": "trial"}, "spec": {}}
    kind = {"apiVersion": "podwire.io/v1", "kind": "Node"}
    try:
        client.create("/apis/podwire.io/v1/nodes?dryRun=All", {**kind, **trial})
    except Refused:
        return False
    return True


def have_a_webhook_that_rejects(server: ApiServer) -> Callable[[], object]:
    path = f"{ADMISSION}/validatingwebhookconfigurations"
    pair = server.authority.issue_server("webhook", ["127.0.0.1"])
    stack = ExitStack()
    port = stack.enter_context(https_rig.serving(pair, https_rig.deny("not in my cluster")))
    authority = base64.b64encode(server.ca.read_bytes()).decode()
    hook = {
        "name": "no.example.com",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/", "caBundle": authority},
        "rules": [PUBLISHED],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    server.client.create(path, {"metadata": {"name": "rejects"}, "webhooks": [hook]})
    stack.callback(server.client.delete, f"{path}/rejects")
    ask_until(lambda: not can_write(server.client), "the webhook")
    return stack.close


def have_a_policy_that_rejects(server: ApiServer) -> Callable[[], object]:
    policies = f"{ADMISSION}/validatingadmissionpolicies"
    bindings = f"{ADMISSION}/validatingadmissionpolicybindings"
    rejects = {
        "metadata": {"name": "rejects"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [PUBLISHED]},
            "validations": [{"expression": "false", "message": "not in this cluster"}],
        },
    }
    server.client.create(policies, rejects)
    binding = {"policyName": "rejects", "validationActions": ["Deny"]}
    server.client.create(bindings, {"metadata": {"name": "rejects"}, "spec": binding})

    def repair() -> None:
        server.client.delete(f"{bindings}/rejects")
        server.client.delete(f"{policies}/rejects")

    ask_until(lambda: not can_write(server.client), "the policy")
    return repair


@dataclass(frozen=True)
class Fault:
    begin: Callable[[ApiServer], Callable[[], object]]
    said: tuple[str, ...]


FAULTS: Final = {
    "a missing RBAC verb": Fault(
        lack_a_verb, ("forbidden", 'RBAC: allow verb "create" on "nodes"')
    ),
    "CRDs missing": Fault(lack_the_definition, ("has no nodes.podwire.io", "kubectl apply -f")),
    "CRDs older": Fault(
        have_an_older_definition, ("spec.claims", "its CRD is older than this podwire")
    ),
    "CRDs newer": Fault(have_a_newer_definition, ("pledge", "it is newer; upgrade podwire")),
    "a webhook that does not answer": Fault(
        have_a_dead_webhook, ("dead.example.com", "repair or remove it")
    ),
    "a webhook that rejects our writes": Fault(
        have_a_webhook_that_rejects,
        ("no.example.com", "not in my cluster", "let it pass nodes.podwire.io"),
    ),
    "a policy that rejects our writes": Fault(
        have_a_policy_that_rejects, ("not in this cluster", "admission policy")
    ),
}


def is_told(cluster: Cluster, texts: Sequence[str]) -> bool:
    """Tell whether an Event says all this."""
    told = cluster.events("n1", "NotPublished")
    return any(all(text in message for text in texts) for message in told)


def is_published(agent: Agent) -> bool:
    try:
        return all(
            agent.store.get(key) is not None
            for key in (node_key(agent.name), endpoints_key(agent.name))
        )
    except Unavailable:  # also where the machine stands still for longer than a request may take
        return False


def said(agent: Agent) -> str:
    return " ".join(check.message for check in agent.health.checks() if not check.ok)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(str(record.__dict__) for record in caplog.records)


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_named_with_what_to_do_and_nothing_is_lost(
    cluster: Cluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault = FAULTS[name]
    repair = fault.begin(cluster.server)
    try:
        agent = cluster.start("n1")
        for text in fault.said:
            ask_until(lambda text=text: text in said(agent), f"{text!r} in status")  # type: ignore[misc]
            assert text in logged(caplog)
        # What was wrong first may have been something else: a server that has just taken a change in. It is told again
        # a minute later.
        ask_until(lambda: is_told(cluster, fault.said), f"an Event that says {fault.said}", EVENT_S)
        # Addresses do not depend on what can be published.
        assert agent.gives()
    finally:
        repair()
    ask_until(lambda: is_published(agent), "what the node publishes")
    ask_until(lambda: not said(agent), "status to be good again")


@contextmanager
def frozen(server: ApiServer) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@contextmanager
def away(server: ApiServer) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def ill(server: ApiServer, answer: https_rig.Answer) -> Iterator[None]:
    """Let another server answer in the API server's place, which has its certificate."""
    pair = server.authority.issue_server("kube-apiserver", [])
    with away(server), https_rig.serving(pair, answer, server.port):
        yield


@contextmanager
def out_of_time(server: ApiServer, begins_in: timedelta) -> Iterator[None]:
    """Let the API server show a certificate of another time than now."""
    directory = server.directory / f"shifted{begins_in.total_seconds():.0f}"
    pair = https_rig.issue_shifted(server.authority, directory, begins_in)
    with away(server), https_rig.serving(pair, https_rig.refuse_all(500, "x"), server.port):
        yield


Outage = Callable[[ApiServer], AbstractContextManager[None]]
OUTAGES: Final[dict[str, tuple[Outage, tuple[str, ...]]]] = {
    "hangs": (frozen, ("no answer", "is the API server running")),
    "is away": (away, ("is the API server running",)),
    "answers 429": (
        lambda server: ill(server, https_rig.refuse_all(429, "TooManyRequests")),
        ("ill: TooManyRequests", "has too much to do; this is tried again"),
    ),
    "answers 500": (
        lambda server: ill(server, https_rig.refuse_all(500, "InternalError")),
        ("ill: InternalError", "see the log of the API server"),
    ),
    "has a certificate that is not valid yet": (
        lambda server: out_of_time(server, timedelta(days=1)),
        ("not yet valid", "set the clock of this host right"),
    ),
    "has a certificate that has expired": (
        lambda server: out_of_time(server, timedelta(days=-2)),
        ("has expired", "renew the server's certificate"),
    ),
}


@pytest.mark.parametrize("how", OUTAGES)
def test_an_api_server_that_does_not_serve_is_named_and_nothing_is_lost(
    cluster: Cluster, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be written the Event comes afterwards, and says that it is over."""
    monkeypatch.setattr(event_writer, "AGAIN_S", (0.5, 1.0))
    # With pauses so short, a server that is slow to know its roles would have refused the Event too often.
    monkeypatch.setattr(event_queue, "REFUSED_MAX", 1_000_000)
    server, (begin, expected) = cluster.server, OUTAGES[how]
    agent = cluster.start("n1")
    ask_until(lambda: is_published(agent), "what the node publishes")
    with begin(server):
        agent.cluster.datapath.underlay = move_underlay(agent)  # type: ignore[attr-defined]
        agent.cluster.ranges_changed()
        for text in expected:
            ask_until(lambda text=text: text in said(agent), f"{text!r} in status")  # type: ignore[misc]
            assert text in logged(caplog)
        assert agent.gives()
        ask_until(lambda: cannot_tell(agent), "an Event that cannot be written")

    def has_moved() -> bool:
        try:
            stored = agent.store.get(node_key("n1"))
        except Unavailable:  # one request at a time finds out whether it answers again
            return False
        return stored is not None and stored.document["spec"]["underlayMTU"] == 1400

    ask_until(has_moved, "what changed meanwhile")
    ask_until(lambda: not said(agent), "status to be good again")
    told = ask_until(lambda: cluster.events("n1", "NotPublished"), "the Event")
    # What was wrong last: one that is started anew does not answer at first, and then knows no roles yet.
    causes = (
        *expected,
        "is the API server running",
        "forbidden",
        "has too much to do",
        "see the log",
    )
    assert any(text in told[0] for text in causes), told
    ask_until(lambda: not cannot_tell(agent), "the end of the warning")


def cannot_tell(agent: Agent) -> bool:
    return any("no Events can be written" in warning for warning in agent.health.warnings())


def move_underlay(agent: Agent) -> Any:

    return replace(agent.cluster.datapath.underlay, mtu_bytes=1400)  # type: ignore[attr-defined]


TOKEN_TIMES: Final = {"that has expired": (-2, -1), "that is not valid yet": (1, 2)}
"""From when to when tokens are valid, in days from now on."""


@pytest.fixture(scope="module")
def account(server: ApiServer) -> dict[str, Any]:
    """Give the agents' service account."""
    namespace = {"metadata": {"name": "podwire-system"}}
    server.client.create("/api/v1/namespaces", namespace)
    path = "/api/v1/namespaces/podwire-system/serviceaccounts"
    made: dict[str, Any] = server.client.create(path, {"metadata": {"name": "podwire-agent"}})
    return made


def sign(server: ApiServer, account: dict[str, Any], begin_days: float, end_days: float) -> str:
    about = {"name": account["metadata"]["name"], "uid": account["metadata"]["uid"]}
    now = time.time()
    claims = {
        "iss": server.url,
        "aud": [server.url],
        "sub": AGENT,
        "iat": int(now + begin_days * 86400),
        "nbf": int(now + begin_days * 86400),
        "exp": int(now + end_days * 86400),
        "kubernetes.io": {"namespace": "podwire-system", "serviceaccount": about},
    }
    return https_rig.sign_token(server.authority.make_signing_key("service-accounts"), claims)


@pytest.mark.parametrize("which", TOKEN_TIMES)
def test_a_token_of_a_running_agent_that_is_refused_is_named_and_a_new_one_is_taken(
    cluster: Cluster,
    account: dict[str, Any],
    which: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_writer, "AGAIN_S", (0.5, 1.0))
    token = tmp_path / "token"
    token.write_text(sign(cluster.server, account, -1, 1), encoding="utf-8")
    agent = cluster.start("n1", token)
    agent.store._client._credentials._read_again_s = (
        0.0  # of which kubelet replaces what has run out
    )
    ask_until(lambda: is_published(agent), "what the node publishes")
    token.write_text(sign(cluster.server, account, *TOKEN_TIMES[which]), encoding="utf-8")
    ask_until(lambda: cannot_read(agent), "the newer token to be shown")
    agent.cluster.datapath.underlay = move_underlay(agent)  # type: ignore[attr-defined]
    agent.cluster.ranges_changed()
    expected = ("does not accept the credentials", "they have expired, are not valid yet", "clocks")
    for text in expected:
        ask_until(lambda text=text: text in said(agent), f"{text!r} in status")  # type: ignore[misc]
        assert text in logged(caplog)
    ask_until(lambda: cannot_tell(agent), "an Event that cannot be written")
    token.write_text(sign(cluster.server, account, -1, 1.5), encoding="utf-8")
    ask_until(lambda: not said(agent), "status to be good again")
    ask_until(lambda: is_told(cluster, expected), f"an Event that says {expected}", EVENT_S)


def cannot_read(agent: Agent) -> bool:
    try:
        agent.store.get(node_key(agent.name))
    except Unavailable:
        return True
    return False


def test_a_token_that_is_refused_at_the_start_is_named_and_a_new_one_is_taken(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig", AGENT)
    document = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    token = tmp_path / "token"
    token.write_text("expired", encoding="utf-8")
    document["users"][0]["user"] = {"tokenFile": str(token)}
    kubeconfig.write_text(json.dumps(document), encoding="utf-8")
    waited: list[tuple[str, str]] = []

    def renew(_s: float) -> None:
        if waited:
            token.write_text(server.users[AGENT].token, encoding="utf-8")

    with closing(KubernetesStore(load_kubeconfig(kubeconfig), name="n1")) as store:
        start = Start(store, Facts(), lambda *told: waited.append(told), pause=renew)
        assert start.wait_for_ranges("n1")
    assert "does not accept the credentials" in waited[0][0]
    assert "they have expired" in waited[0][1]


def test_a_node_without_ranges_waits_and_says_so_in_an_event(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_node("bare", "")
    access = load_kubeconfig(server.write_kubeconfig(tmp_path / "kubeconfig", AGENT))
    with closing(KubernetesStore(access, name="bare")) as store:
        waited: list[str] = []

        with ExitStack() as stack:
            _, wait_for_it = open_events(
                find_event_writer(store),
                "bare",
                Health(FakeClock()),
                Metrics(),
                stack,
                lambda reason, _hint: waited.append(reason),
            )

            def give_after_the_event(_s: float) -> None:
                told = ask_until(lambda: cluster.events("bare", "WaitsToStart"), "the Event")
                assert "its core Node has no podCIDR" in told[0]
                assert "--allocate-node-cidrs" in told[0]
                spec = {"podCIDR": "10.244.9.0/24", "podCIDRs": ["10.244.9.0/24"]}
                server.client.patch("/api/v1/nodes/bare", {"spec": spec})

            start = Start(store, Facts(), wait_for_it, pause=give_after_the_event)
            assert list(map(str, start.wait_for_ranges("bare"))) == ["10.244.9.0/24"]
    assert "has no podCIDR" in waited[0]


@pytest.mark.parametrize(
    ("ahead_s", "told"),
    [(0, ""), (20, ""), (400, "more than 5 minutes ahead"), (-4000, "more than an hour behind")],
)
def test_clocks_that_differ_are_named(
    server: ApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ahead_s: float,
    told: str,
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    access = load_kubeconfig(server.write_kubeconfig(tmp_path / "kubeconfig", AGENT))
    with closing(KubernetesStore(access, name="n1")) as store:
        said = describe_clock(store)
    assert told in said
    assert bool(said) is bool(told)
    assert not told or "time server" in said

"""The Kubernetes back end against a real API server that fails, forgets, refuses and changes; what it asks of it."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from podwire.control.cluster.facts import encode_node
from podwire.control.identity.collect import publish_holds
from podwire.kernel.spawn import run_helper
from podwire.lab.kubernetes.api_server import ApiServer, User
from podwire.model.cluster import NodeFacts
from podwire.model.errors import Conflict, InvalidRequest, PodwireError, Unavailable
from podwire.model.store import Compacted, KindUnavailable, ObjectKey, StoredObject, Watch
from podwire.store.kubernetes.api.access import Access
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.api.resources import selectors_of_node
from podwire.store.kubernetes.store import KubernetesStore
from podwire.store.manifest import dump
from podwire.store.open import ClusterAccess, list_hosts
from podwire.store.open import open_store as open_by_url
from tests.contract import api_rig
from tests.contract.kubernetes_rig import CRDS, install_crds
from tests.contract.proxy import STALLED, Proxy
from tests.waiting import ask_until, within

DEADLINE_S = 120.0
SOON_S = 3.0
"""The deadline of requests where a test waits for it to pass."""
AGENT = "agent"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
RBAC = "/apis/rbac.authorization.k8s.io/v1"

Open = Callable[..., KubernetesStore]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that each test leaves running as it found it."""
    with api_rig.started(tmp_path_factory.mktemp("kubernetes"), [User(AGENT)]) as server:
        install_crds(server)
        yield server


@pytest.fixture
def access(server: ApiServer, tmp_path: Path) -> Access:
    return load_kubeconfig(server.write_kubeconfig(tmp_path / "kubeconfig"))


@pytest.fixture
def open_store(access: Access) -> Iterator[Open]:
    opened: list[KubernetesStore] = []

    def open_it(*, to: Access = access, **options: Any) -> KubernetesStore:
        opened.append(KubernetesStore(to, **{"deadline_s": DEADLINE_S, **options}))
        return opened[-1]

    yield open_it
    for still_open in opened:
        still_open.close()


@pytest.fixture
def store(open_store: Open) -> KubernetesStore:
    found = open_store()
    for stored in found.list("workloads")[0]:
        found.delete(stored.key)
    return found


def workload(name: str, value: str = "x") -> StoredObject:
    document = {"spec": {"namePattern": "db-*", "labels": {"app": value}}}
    return StoredObject(key=ObjectKey("workloads", "", name), document=document)


def node(name: str) -> ObjectKey:
    return ObjectKey("nodes", "", name)


def watch_workloads(store: KubernetesStore) -> Watch:
    return store.watch({"workloads": store.list("workloads")[1]})


def take(watch: Watch, count: int) -> list[str]:
    """Give the names of `count` changes, whatever breaks in between."""
    found: list[str] = []

    def look() -> bool:
        try:
            found.extend(event.object.key.name for event in watch.next(0.2))
        except Compacted:
            raise
        except Unavailable:
            return False
        return len(found) >= count

    ask_until(look, f"{count} changes")
    return found


def answers(store: KubernetesStore) -> bool:
    try:
        store.list("workloads")
    except Unavailable:
        return False
    return True


def watches_of(server: ApiServer, plural: str, since: int) -> list[str]:
    """Give the URIs of watches that began after the first `since` lines of the audit log."""
    return [
        call["requestURI"]
        for call in server.read_audit()[since:]
        if call["verb"] == "watch"
        and call["stage"] == "ResponseStarted"
        and call["objectRef"]["resource"] == plural
    ]


# ------------------------------------------------------------------ a server that is away


def test_a_killed_server_costs_no_change(server: ApiServer, store: KubernetesStore) -> None:
    with watch_workloads(store) as watch:
        store.create(workload("a"))
        assert take(watch, 1) == ["a"]
        server.kill()
        try:
            with pytest.raises(Unavailable):
                ask_until(lambda: watch.next(1.0) and False)
            with pytest.raises(
                Unavailable, match=r"list workloads\.podwire\.io: .*refused"
            ) as caught:
                store.list("workloads")
            assert "running pods are not affected" in caught.value.hint
        finally:
            server.start()
        store.create(workload("b"))
        assert follow_until(store, watch, "b") == {"a", "b"}


def follow_until(store: KubernetesStore, watch: Watch, name: str) -> set[str]:
    """Do as a follower does until an object is known: an API server that was restarted may have forgotten."""
    known = {"a"}
    try:
        while name not in known:
            known.update(take(watch, 1))
    except Compacted as compacted:
        found, revision = store.list("workloads")
        with store.watch({**watch.revisions, "workloads": revision}) as again:
            assert again.failing == {}
        known = {stored.key.name for stored in found}
        if compacted.kinds != {"workloads"}:
            known.clear()
    return known


def test_an_opened_store_waits_for_a_server_that_comes(server: ApiServer, open_store: Open) -> None:
    server.kill()
    try:
        store = open_store()
        watch = store.watch({"workloads": 1, "nodes": 1})
        with pytest.raises(Unavailable):
            watch.next(0.1)
    finally:
        server.start()
    ask_until(lambda: answers(store), "an answer")
    with pytest.raises(Compacted) as caught:
        ask_until(lambda: _next(watch) and False)
    assert caught.value.kinds <= {"workloads", "nodes"}


def _next(watch: Watch) -> bool:
    try:
        watch.next(0.2)
    except Compacted:
        raise
    except Unavailable:
        return False
    return True


def test_what_the_server_has_forgotten_is_listed_again(
    server: ApiServer, store: KubernetesStore
) -> None:
    with watch_workloads(store) as watch:
        revisions = watch.revisions
    store.create(workload("a"))
    store.create(workload("b"))
    server.compact()
    server.kill()
    server.start()
    ask_until(lambda: answers(store), "an answer")
    with store.watch(revisions) as watch, pytest.raises(Compacted) as caught:
        ask_until(lambda: _next(watch) and False)
    assert caught.value.kinds == {"workloads"}
    assert "after revision" in caught.value.message
    names = [stored.key.name for stored in store.list("workloads")[0]]
    assert names == ["a", "b"]


def test_a_server_that_hangs_holds_nobody_for_long(
    server: ApiServer, store: KubernetesStore, open_store: Open
) -> None:
    impatient = open_store(deadline_s=SOON_S)
    with watch_workloads(store) as watch:
        server.freeze()
        try:

            def ask() -> None:
                with pytest.raises(Unavailable, match=r"no answer of .* within 3 s"):
                    impatient.get(workload("a").key)

            ask()
            within(SOON_S / 2, ask)  # others do not wait for it, too
        finally:
            server.thaw()
        ask_until(lambda: answers(impatient), "an answer")
        impatient.create(workload("a"))
        assert take(watch, 1) == ["a"]


def test_closing_leaves_nothing_open_whatever_the_server_does(
    server: ApiServer, access: Access
) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for hangs in (False, True):
        store = KubernetesStore(access)
        store.watch({kind: store.list(kind)[1] for kind in ("workloads", "nodes")})
        if hangs:
            server.freeze()
        began_s = time.monotonic()
        try:
            store.close()
        finally:
            server.thaw()
        assert time.monotonic() - began_s < DEADLINE_S / 4
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(Unavailable, match="closed"):
            store.list("workloads")


def test_a_connection_that_died_in_silence_is_opened_anew(
    server: ApiServer, access: Access, open_store: Open
) -> None:
    with Proxy(f"127.0.0.1:{server.port}") as proxy:
        through = msgspec.structs.replace(access, server=f"https://{proxy.endpoint}")
        store = open_store(to=through, idle_s=1.0)
        with watch_workloads(store) as watch:
            proxy.become(STALLED)
            other = open_store()
            other.create(workload("silent"))
            proxy.become("open")
            assert take(watch, 1) == ["silent"]
            other.delete(workload("silent").key)


def test_a_write_whose_answer_is_lost_is_not_sent_again(
    server: ApiServer, access: Access, open_store: Open, store: KubernetesStore
) -> None:
    with Proxy(f"127.0.0.1:{server.port}") as proxy:
        through = open_store(to=msgspec.structs.replace(access, server=f"https://{proxy.endpoint}"))
        through.list("workloads")
        proxy.become("deaf")
        with pytest.raises(Unavailable):
            through.create(workload("a"))
    ask_until(lambda: store.get(workload("a").key), "what was written")


# ------------------------------------------------------------------ a server that refuses


def as_agent(server: ApiServer, access: Access, token: str | None = None) -> Access:
    user = replace(access.user, token=server.users[AGENT].token if token is None else token)
    return msgspec.structs.replace(access, user=user, who="as user 'agent'")


def grant(server: ApiServer, rules: list[dict[str, Any]]) -> None:
    """Let the agent's user do exactly this."""
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole"}
    server.client.apply(
        f"{RBAC}/clusterroles/agent", {**role, "metadata": {"name": "agent"}, "rules": rules}
    )
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "agent"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "agent",
        },
        "subjects": [{"kind": "User", "name": AGENT, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    server.client.apply(f"{RBAC}/clusterrolebindings/agent", binding)


def rule(resources: str, verbs: str) -> dict[str, Any]:
    return {
        "apiGroups": ["podwire.io"],
        "resources": resources.split(),
        "verbs": verbs.split(),
    }


def test_a_missing_permission_is_named_and_its_coming_noticed(
    server: ApiServer, access: Access, open_store: Open, store: KubernetesStore
) -> None:
    grant(server, [rule("workloads", "list watch create"), rule("ippools", "list")])
    agent = open_store(to=as_agent(server, access))
    ask_until(lambda: answers(agent), "the permission to list")
    with pytest.raises(
        KindUnavailable, match='User "agent" cannot list resource "nodes"'
    ) as caught:
        agent.list("nodes")
    assert 'verb "list" on "nodes" of API group "podwire.io"' in caught.value.hint
    with pytest.raises(KindUnavailable) as caught:
        agent.delete(agent.create(workload("kept")).key)
    assert 'verb "get" on "workloads"' in caught.value.hint
    after = {kind: agent.list(kind)[1] for kind in ("workloads", "ippools")}
    with agent.watch(after) as watch:
        ask_until(lambda: _next(watch) and watch.failing, "what cannot be watched")
        assert 'User "agent" cannot watch resource "ippools"' in watch.failing["ippools"]
        assert watch.failing.keys() == {"ippools"}
        store.create(workload("a"))
        take(watch, 1)
        grant(server, [rule("workloads ippools", "list watch")])
        ask_until(lambda: _next(watch) and not watch.failing, "the end of the failure")


def test_an_expired_token_is_replaced_by_what_its_file_says(
    server: ApiServer, access: Access, open_store: Open, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text("expired")
    user = replace(access.user, token="", token_file=str(path))
    store = open_store(
        to=msgspec.structs.replace(access, user=user, who=f"with the token in {path}")
    )
    with pytest.raises(Unavailable, match=f"credentials with the token in {path}") as caught:
        store.list("workloads")
    assert "expired" in caught.value.hint
    with store.watch({"workloads": 0}) as watch, pytest.raises(Unavailable):
        watch.next(0.1)
    path.write_text(server.admin_token)
    store.list("workloads")
    path.write_text("expired again")
    store.list("workloads")


def test_client_certificates_are_shown(server: ApiServer, open_store: Open, tmp_path: Path) -> None:
    path = server.write_kubeconfig(tmp_path / "certified", with_certificate=True)
    assert answers(open_store(to=load_kubeconfig(path)))


def test_an_untrusted_server_is_told_nothing(
    server: ApiServer, access: Access, open_store: Open
) -> None:
    store = open_store(to=msgspec.structs.replace(access, ca=type(access.ca)()), name="distrustful")
    with pytest.raises(Unavailable, match="its certificate is not trusted") as caught:
        store.list("workloads")
    assert "certificate-authority" in caught.value.hint
    # By name: what clients of earlier tests asked may be logged only now.
    assert not [call for call in server.read_audit() if "distrustful" in call.get("userAgent", "")]


def test_an_admission_policy_that_says_no_is_named(
    server: ApiServer, store: KubernetesStore
) -> None:
    base = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "no-blocks"}}
    matched = {
        "apiGroups": ["podwire.io"],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["ipblocks"],
    }
    policy = {
        "matchConstraints": {"resourceRules": [matched]},
        "validations": [{"expression": "false", "message": "not here"}],
    }
    binding = {"policyName": "no-blocks", "validationActions": ["Deny"]}
    server.client.create(
        f"{base}ies", {**kind, "kind": "ValidatingAdmissionPolicy", "spec": policy}
    )
    server.client.create(
        f"{base}ybindings", {**kind, "kind": "ValidatingAdmissionPolicyBinding", "spec": binding}
    )

    def refusal() -> PodwireError | None:
        new = StoredObject(
            key=ObjectKey("ipblocks", "", "10-0-0-0-26"),
            document={"spec": {"cidr": "10.0.0.0/26", "node": "n1"}},
        )
        try:
            store.delete(store.create(new).key)
        except PodwireError as error:
            return error
        return None

    error = ask_until(refusal, "the policy")
    assert isinstance(error, Unavailable)
    assert "not here" in error.message
    assert "admission policy" in error.hint


def test_what_is_kubernetes_own_is_neither_made_nor_deleted(store: KubernetesStore) -> None:
    for kind in ("namespaces", "nodes.core"):
        key = ObjectKey(kind, "", "default")
        stored = StoredObject(key=key, revision=1)
        writes: list[Callable[[], object]] = [
            partial(store.create, stored),
            partial(store.update, stored),
            partial(store.patch, key, {}),
            partial(store.delete, key),
        ]
        for write in writes:
            with pytest.raises(InvalidRequest, match="Kubernetes' own"):
                write()
    assert store.get(ObjectKey("namespaces", "", "default")) is not None


# ------------------------------------------------------------------ CRDs that are missing, and of another version


def definition(plural: str, **changes: Any) -> dict[str, Any]:
    """Give a CRD of ours."""
    found: dict[str, Any] = yaml.safe_load((CRDS / f"{plural}.yaml").read_text())
    return {**found, **changes}


def cilium_policies() -> dict[str, Any]:
    """Give a CRD as Cilium's installation makes it, as far as it matters here."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "ciliumnetworkpolicies", "kind": "CiliumNetworkPolicy"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "ciliumnetworkpolicies.cilium.io"},
        "spec": {
            "group": "cilium.io",
            "names": names,
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def test_kinds_of_cilium_are_empty_until_their_crd_comes(
    server: ApiServer, store: KubernetesStore
) -> None:
    kind = "ciliumnetworkpolicies"
    key = ObjectKey(kind, "default", "a")
    assert store.list(kind) == ([], 0)
    assert store.get(key) is None
    with store.watch({kind: 0, "workloads": store.list("workloads")[1]}) as watch:
        assert watch.next(0.1) == ()
        assert watch.failing == {}
        server.client.create(DEFINITIONS, cilium_policies())
        with pytest.raises(Compacted) as caught:
            ask_until(lambda: _next(watch) and False)
        assert caught.value.kinds == {kind}
    made = store.create(StoredObject(key=key, document={"spec": {"whatComesNext": 1}}))
    assert made.document["spec"] == {"whatComesNext": 1}
    found, revision = store.list(kind)
    assert found == [made]
    with store.watch({kind: revision}) as watch:
        server.client.delete(f"{DEFINITIONS}/ciliumnetworkpolicies.cilium.io")
        assert take(watch, 1) == ["a"]
        ask_until(lambda: store.list(kind) == ([], 0), "the end of the kind")


def test_a_missing_crd_of_ours_is_named_and_its_coming_noticed(
    server: ApiServer, store: KubernetesStore
) -> None:
    path = f"{DEFINITIONS}/ipaddresses.podwire.io"
    server.client.delete(path)

    def refusal() -> KindUnavailable | None:
        try:
            store.list("ipaddresses")
        except KindUnavailable as error:
            return error
        return None

    error = ask_until(refusal, "the end of the kind")
    assert error is not None
    assert "the API server has no ipaddresses.podwire.io in podwire.io/v1" in error.message
    assert "kubectl apply -f deploy/crds/" in error.hint
    with store.watch({"ipaddresses": 1, "workloads": store.list("workloads")[1]}) as watch:
        ask_until(lambda: _next(watch) and watch.failing, "what cannot be watched")
        server.client.create(DEFINITIONS, definition("ipaddresses"))
        ask_until(lambda: refusal() is None, "the kind")
        with pytest.raises(Compacted) as caught:
            ask_until(lambda: _next(watch) and False)
        assert caught.value.kinds == {"ipaddresses"}, "what its revision 1 was is forgotten"


def test_a_field_that_an_older_crd_lacks_is_refused_and_named(store: KubernetesStore) -> None:
    made = store.create(workload("a"))
    with pytest.raises(Unavailable, match=r'unknown field "spec\.whatComesNext"') as caught:
        store.patch(made.key, {"spec": {"whatComesNext": 1}})
    assert "older than this podwire" in caught.value.hint
    assert store.get(made.key) == made


def test_writers_of_two_versions_keep_each_others_fields(
    server: ApiServer, store: KubernetesStore
) -> None:
    newer = definition("nodes")
    schema = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    schema["properties"]["whatComesNext"] = {"type": "integer"}
    server.client.apply(f"{DEFINITIONS}/nodes.podwire.io", newer)
    key = node("n1")

    def write_as_newer() -> bool:
        try:
            store.patch(key, {"spec": {"whatComesNext": 7}})
        except Unavailable:
            return False  # the API server takes a moment to use the new schema
        return True

    facts = NodeFacts(name="n1", instance="i", epoch=1, addresses=())
    store.create(StoredObject(key=key, document=encode_node(facts)))
    ask_until(write_as_newer, "the newer CRD")
    publish_holds(store, "n1", [70000])
    found = store.get(key)
    assert found is not None
    assert found.document["spec"]["whatComesNext"] == 7
    document = encode_node(msgspec.structs.replace(facts, epoch=2), found.document)
    written = store.update(
        StoredObject(key=key, uid=found.uid, revision=found.revision, document=document)
    )
    store.patch(key, {"spec": {"whatComesNext": 8}})
    found = store.get(key)
    assert found is not None
    spec = found.document["spec"]
    assert (spec["whatComesNext"], spec["epoch"], spec["instance"]) == (8, 2, "i")
    assert written.document["spec"]["whatComesNext"] == 7
    store.delete(key)
    server.client.apply(f"{DEFINITIONS}/nodes.podwire.io", definition("nodes"))


# ------------------------------------------------------------------ what is asked of the server


def test_the_command_line_speaks_to_the_api_server(server: ApiServer, tmp_path: Path) -> None:
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "shut"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }
    (tmp_path / "policy.yaml").write_text(dump([policy]))

    def podwire(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "podwire.cli.main", *words, "--store", "kubernetes"],
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=subprocess.PIPE,
            check=True,
            timeout=DEADLINE_S,
            text=True,
        ).stdout

    results = [podwire("apply", "-f", str(tmp_path / "policy.yaml")).split()[-1] for _ in range(2)]
    assert results == ["created", "unchanged"]
    assert '"shut"' in podwire("get", "netpol", "shut", "-n", "default", "-o", "json")
    podwire("delete", "netpol", "shut", "-n", "default")
    assert "shut" not in podwire("get", "netpol", "-A")


def test_a_plugin_gives_the_token(server: ApiServer, tmp_path: Path) -> None:
    version = "client.authentication.k8s.io/v1"
    answer = {"apiVersion": version, "status": {"token": server.admin_token}}
    plugin = tmp_path / "get-token"
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    plugin.chmod(0o700)
    path = server.write_kubeconfig(tmp_path / "kubeconfig")
    config = yaml.safe_load(path.read_text())
    spec = {"apiVersion": version, "command": "./get-token", "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": spec}
    path.write_text(dump([config]))
    cluster = ClusterAccess(str(path), os.environ, run_helper=run_helper)
    with closing(open_by_url("kubernetes", cluster=cluster)) as store:
        assert store.list("namespaces")[0]
    assert list_hosts("kubernetes", cluster) == ("127.0.0.1",)


def test_each_kind_is_watched_once_whoever_reads_it(
    server: ApiServer, store: KubernetesStore
) -> None:
    since = len(server.read_audit())
    store.list("ippools")  # the server knows nothing of a kind from before its first reader
    store.create(workload("later"))
    revision = store.list("ippools")[1]
    with store.watch({"ippools": revision}) as first:
        key = ObjectKey("ippools", "", "p")
        made = store.create(StoredObject(key=key, document={"spec": {"cidr": "10.0.0.0/16"}}))
        assert take(first, 1) == ["p"]
        with (
            store.watch({"ippools": revision}) as early,
            store.watch({"ippools": made.revision}) as late,
        ):
            assert take(early, 1) == ["p"]
            store.delete(key)
            assert [take(watch, 1) for watch in (first, early, late)] == [["p"]] * 3
        with store.watch({"ippools": revision - 1}) as earliest:
            assert take(earliest, 2) == ["p", "p"]
        assert first.next(0) == (), "nothing comes twice"
    begun = ask_until(lambda: watches_of(server, "ippools", since), "the audit log")
    assert len(begun) <= 2, "once, and once more for a reader that began before the first"
    assert all("allowWatchBookmarks=true" in watch for watch in begun)


def test_an_agent_reads_only_its_own_pods_and_core_node(
    server: ApiServer, open_store: Open
) -> None:
    for name in ("n1", "n2"):
        core = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        server.client.apply(f"/api/v1/nodes/{name}", core)
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"on-{name}"},
            "spec": {
                "nodeName": name,
                "automountServiceAccountToken": False,
                "containers": [{"name": "c", "image": "i"}],
            },
        }
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        server.client.apply("/api/v1/namespaces/default/serviceaccounts/default", account)
        server.client.create("/api/v1/namespaces/default/pods", pod)
    since = len(server.read_audit())
    agent = open_store(selectors=selectors_of_node("n1"))

    def list_own() -> dict[str, int] | None:
        """Give the revisions of what the server knows by now: one that may answer from memory is a little behind."""
        lists = {kind: agent.list(kind, at_least=0) for kind in ("pods", "nodes.core")}
        names = [[stored.key.name for stored in found] for found, _ in lists.values()]
        is_whole = names == [["on-n1"], ["n1"]]
        return {kind: revision for kind, (_, revision) in lists.items()} if is_whole else None

    revisions = ask_until(list_own, "its own pod and core Node, and nothing else")
    with agent.watch(revisions) as watch:
        labels = {"metadata": {"labels": {"a": "b"}}}
        for name in ("n2", "n1"):
            server.client.patch(f"/api/v1/namespaces/default/pods/on-{name}", labels)
            server.client.patch(f"/api/v1/nodes/{name}", labels)
        assert sorted(take(watch, 2)) == ["n1", "on-n1"]
    other = agent.get(ObjectKey("nodes.core", "", "n2"))
    assert other is not None, "a contest is decided by both"
    asked = [
        call["requestURI"]
        for call in server.read_audit()[since:]
        if "podwire" in call.get("userAgent", "") and call["verb"] in ("list", "watch")
    ]
    assert asked
    assert all("fieldSelector=" in call for call in asked if "/pods?" in call or "/nodes?" in call)


def test_long_lists_come_in_pages_of_one_moment(server: ApiServer, store: KubernetesStore) -> None:
    for number in range(501):
        store.create(workload(f"w{number:04}"))
    since = len(server.read_audit())
    found, revision = store.list("workloads")
    assert len(found) == 501
    assert revision >= max(stored.revision for stored in found)
    asked = ask_until(
        lambda: [
            call["requestURI"]
            for call in server.read_audit()[since:]
            if call["verb"] == "list" and call["objectRef"]["resource"] == "workloads"
        ],
        "the audit log",
    )
    assert all("limit=500" in call for call in asked)
    again, revision_again = store.list("workloads", at_least=revision)
    assert again == found
    assert revision_again >= revision, "other kinds may have changed meanwhile"
    server.client.delete("/apis/podwire.io/v1/workloads")


def test_an_agent_may_mark_an_identity_and_change_nothing_of_it(
    server: ApiServer, access: Access, open_store: Open
) -> None:
    grant(server, [rule("identities", "get list create"), rule("identities/status", "patch")])
    agent = open_store(to=as_agent(server, access))
    key = ObjectKey("identities", "", "70000")

    def create() -> StoredObject | None:
        try:
            return agent.create(StoredObject(key=key, document={"spec": {"labels": ["k8s:a=b"]}}))
        except KindUnavailable:
            return None  # the server hears of the permission a moment later

    made = ask_until(create, "the permission")
    assert made is not None
    mark = {"metadata": {"annotations": {"podwire.io/unused-since": "2026-01-01T00:00:00Z"}}}
    marked = agent.patch(key, mark, revision=made.revision, uid=made.uid)
    assert marked.document["metadata"]["annotations"] == mark["metadata"]["annotations"]
    with pytest.raises(Conflict):
        agent.patch(
            key,
            {"metadata": {"annotations": {"podwire.io/unused-since": None}}},
            revision=made.revision,
        )
    cleared = agent.patch(key, {"metadata": {"annotations": {"podwire.io/unused-since": None}}})
    assert cleared.document == made.document
    with pytest.raises(KindUnavailable):
        agent.patch(key, {"metadata": {"labels": {"a": "b"}}})
    with (
        closing(open_store()) as admin,
        pytest.raises(InvalidRequest, match="means the same for ever"),
    ):
        admin.patch(key, {"spec": {"labels": ["k8s:a=c"]}})

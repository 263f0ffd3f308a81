"""Kinds as resources of the API, its objects as the store's, and what its refusals mean."""

import json
from typing import Any

import msgspec
import pytest

from podwire.control.identity.known import RESTING_SINCE, UNUSED_SINCE
from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError, Unavailable
from podwire.model.store import KindUnavailable, ObjectKey, StoredObject
from podwire.model.store.kinds import KINDS
from podwire.store.kubernetes.api.refusals import Intent, Refused, explain
from podwire.store.kubernetes.api.resources import (
    RESOURCES,
    Resource,
    find_resource,
    selectors_of_node,
    with_query,
)
from podwire.store.kubernetes.api.wire import read_status
from podwire.store.kubernetes.objects import (
    decode_object,
    encode_object,
    encode_patch,
    split_status,
)

PATHS = {
    "pods": "/api/v1/namespaces/shop/pods/a",
    "namespaces": "/api/v1/namespaces/a",
    "nodes": "/apis/podwire.io/v1/nodes/a",
    "nodes.core": "/api/v1/nodes/a",
    "networkpolicies": "/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies/a",
    "ciliumclusterwidenetworkpolicies": "/apis/cilium.io/v2/ciliumclusterwidenetworkpolicies/a",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/a",
}


@pytest.mark.parametrize(("kind", "path"), PATHS.items(), ids=PATHS)
def test_paths(kind: str, path: str) -> None:
    resource = find_resource(kind)
    key = ObjectKey(kind, "shop" if resource.namespaced else "", "a")
    assert resource.object_path(key) == path
    assert resource.object_path(key, "status") == f"{path}/status"
    everywhere = path.removesuffix("/a").replace("/namespaces/shop", "")
    assert resource.path() == everywhere


def test_every_kind_is_a_resource() -> None:
    assert {kind.plural for kind in KINDS} <= RESOURCES.keys()
    assert [resource.full_name for resource in RESOURCES.values() if resource.is_read_only] == [
        "namespaces",
        "services",
        "endpointslices.discovery.k8s.io",
        "configmaps",
        "nodes",
        "pods",
    ]
    with pytest.raises(InvalidRequest, match="there is no such kind"):
        find_resource("nothing")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a%2fb", "a?b", "a b", "ü", "x" * 254])
def test_names_that_no_path_has_name_nothing(name: str) -> None:
    resource = find_resource("networkpolicies")
    assert not resource.can_exist(ObjectKey("networkpolicies", "default", name))
    assert not resource.can_exist(ObjectKey("networkpolicies", name, "a"))
    assert resource.can_exist(ObjectKey("networkpolicies", "default", "a.b-c"))
    assert not find_resource("workloads").can_exist(ObjectKey("workloads", "default", "a"))


def test_an_agent_reads_its_own_node_and_pods() -> None:
    selectors = selectors_of_node("n1")
    assert with_query("/p", selectors["pods"].query()) == "/p?fieldSelector=spec.nodeName%3Dn1"
    assert selectors["nodes.core"].query() == {"fieldSelector": "metadata.name=n1"}
    assert "service-proxy-name" in selectors["services"].query()["labelSelector"]


# ------------------------------------------------------------------ objects


def raw(document: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(document).encode())


META = {
    "name": "a",
    "namespace": "shop",
    "uid": "u",
    "resourceVersion": "17",
    "creationTimestamp": "2026-01-01T00:00:00Z",
    "generation": 3,
    "labels": {"app": "x"},
    "managedFields": [{"manager": "kubectl"}],
}


def test_of_a_policy_everything_is_seen_that_somebody_wrote() -> None:
    spec = {"podSelector": {}, "whatComesNext": [1]}
    given = {"metadata": META, "spec": spec, "status": {"conditions": []}, "more": True}
    found = decode_object(find_resource("networkpolicies"), raw(given))
    assert found.key == ObjectKey("networkpolicies", "shop", "a")
    assert (found.uid, found.revision, found.created) == ("u", 17, "2026-01-01T00:00:00Z")
    assert found.document == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "a", "namespace": "shop", "labels": {"app": "x"}},
        "spec": spec,
        "more": True,
    }


def test_of_a_pod_what_is_used_is_read() -> None:
    ports = [{"name": "http", "containerPort": 80, "protocol": "TCP"}]
    spec = {
        "nodeName": "n1",
        "serviceAccountName": "s",
        "containers": [{"name": "c", "image": "i", "env": [{}], "ports": ports}],
        "volumes": [{}],
    }
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "x", "controller": True}
    given = {
        "metadata": {**META, "ownerReferences": [owner]},
        "spec": spec,
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    }
    found = decode_object(find_resource("pods"), raw(given)).document
    assert found["metadata"] == {
        "name": "a",
        "namespace": "shop",
        "labels": {"app": "x"},
        "ownerReferences": [owner],
    }
    assert found["spec"] == {
        "nodeName": "n1",
        "serviceAccountName": "s",
        "containers": [{"name": "c", "ports": ports}],
    }
    assert found["status"] == {"phase": "Running"}


def test_an_object_of_an_unexpected_form_has_a_fault() -> None:
    found = decode_object(find_resource("pods"), raw({"metadata": META, "spec": {"nodeName": 7}}))
    assert found.key.name == "a"
    assert "Expected `str`" in found.fault
    assert found.document == {}


def test_what_the_server_keeps_is_not_written() -> None:
    document = {"metadata": {**META, "name": "other"}, "spec": {"v": 1}}
    new = StoredObject(key=ObjectKey("networkpolicies", "shop", "a"), document=document)
    body, status = encode_object(find_resource("networkpolicies"), new, revision=5, uid="w")
    assert status == {}
    assert json.loads(body)["metadata"] == {
        "name": "a",
        "namespace": "shop",
        "labels": {"app": "x"},
        "resourceVersion": "5",
        "uid": "w",
    }


def test_preconditions_of_a_patch() -> None:
    key = ObjectKey("nodes", "", "a")
    changes = {"metadata": {"labels": {"a": None}}, "spec": {"holds": [1]}}
    assert json.loads(encode_patch(key, changes, revision=None, uid="")) == changes
    assert json.loads(encode_patch(key, changes, revision=7, uid="u"))["metadata"] == {
        "labels": {"a": None},
        "resourceVersion": "7",
        "uid": "u",
    }


def test_marks_of_identities_are_kept_in_their_status() -> None:
    resource = find_resource("identities")
    assert set(resource.status_of_annotations) == {UNUSED_SINCE, RESTING_SINCE}
    marks = {UNUSED_SINCE: "t", RESTING_SINCE: None}
    assert split_status(resource, {"metadata": {"annotations": marks}}) == (
        {},
        {"unusedSince": "t", "restingSince": None},
    )
    both = {"metadata": {"annotations": {"a": "b", UNUSED_SINCE: "t"}}, "spec": {}}
    kept = {"metadata": {"annotations": {"a": "b"}}, "spec": {}}
    assert split_status(resource, both) == (kept, {"unusedSince": "t"})
    assert split_status(find_resource("nodes"), both) == (both, {})
    given = {"metadata": {"name": "7"}, "spec": {}, "status": {"unusedSince": "t"}}
    found = decode_object(resource, raw(given)).document
    assert found["metadata"]["annotations"] == {UNUSED_SINCE: "t"}
    assert "status" not in found


# ------------------------------------------------------------------ refusals

OWN, CORE = find_resource("nodes"), find_resource("pods")


def status(code: int, message: str = "", reason: str = "", name: str = "") -> bytes:
    details = {"name": name} if name else None
    return json.dumps(
        {"kind": "Status", "message": message, "reason": reason, "code": code, "details": details}
    ).encode()


REFUSALS: dict[str, tuple[Resource, int, bytes, type[PodwireError], str]] = {
    "no permission": (OWN, 403, status(403, 'User "a" cannot patch'), KindUnavailable, '"patch" on "nodes"'),
    "expired": (OWN, 401, status(401, "Unauthorized"), Unavailable, "expired"),
    "no CRD": (OWN, 404, b"404 page not found\n", KindUnavailable, "nodes.podwire.io"),
    "no such version": (CORE, 404, b"404 page not found\n", KindUnavailable, "serve v1?"),
    "no object": (OWN, 404, status(404, "not found", "NotFound", "n1"), NotFound, "kubectl get nodes.podwire.io"),
    "no namespace": (CORE, 404, status(404, "not found", "NotFound", "shop"), NotFound, "kubectl get pods"),
    "another was faster": (OWN, 409, status(409, "Conflict", "Conflict"), Conflict, "read it again"),
    "wrong": (OWN, 422, status(422, "spec.v: Invalid value"), InvalidRequest, "nothing was written"),
    "too large": (OWN, 413, status(413, "limit is 3145728"), InvalidRequest, "several objects"),
    "too large for etcd": (OWN, 500, status(500, "etcdserver: request is too large"), InvalidRequest, "several"),
    "an old CRD": (
        OWN, 400, status(400, 'x: strict decoding error: unknown field "spec.v"'), Unavailable, "older than this",
    ),
    "a webhook says no": (
        OWN, 403, status(403, 'admission webhook "w" denied the request'), Unavailable, "a webhook or an",
    ),
    "a policy says no": (
        OWN, 422, status(422, "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"),
        Unavailable, "an admission policy",
    ),
    "a webhook is away": (OWN, 500, status(500, 'failed calling webhook "w"'), Unavailable, "repair or remove"),
    "too much to do": (OWN, 429, status(429, "slow down"), Unavailable, "tried again"),
    "broken": (OWN, 500, b"oops", Unavailable, "log of the API server"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("resource", "code", "body", "kind", "hint"), REFUSALS.values(), ids=REFUSALS
)
def test_refusals_say_what_to_do(
    resource: Resource, code: int, body: bytes, kind: type[PodwireError], hint: str
) -> None:
    refused = Refused(Intent("patch", resource, "n1"), read_status(body, code))
    error = explain(refused, "as user 'a'")
    assert type(error) is kind
    assert error.message.startswith(f"patch {resource.full_name} n1: ")
    assert hint in error.hint


def test_permissions_are_named_as_in_rbac() -> None:
    intent = Intent("patch", find_resource("identities"), "70000", subresource="status")
    assert str(intent) == "patch identities/status.podwire.io 70000"
    error = explain(Refused(intent, read_status(status(403, "no"), 403)), "as user 'a'")
    assert '"patch" on "identities/status" of API group "podwire.io"' in error.hint
    assert "(as user 'a')" in error.message


def test_an_absent_object_is_no_absent_resource() -> None:
    intent = Intent("get", OWN, "n1")
    without = Refused(intent, read_status(b"404 page not found", 404))
    assert (without.is_without_object, without.is_without_resource) == (False, True)
    without = Refused(intent, read_status(status(404, name="n1"), 404))
    assert (without.is_without_object, without.is_without_resource) == (True, False)
    expired = Refused(intent, read_status(status(410, "too old"), 500))
    assert expired.is_expired

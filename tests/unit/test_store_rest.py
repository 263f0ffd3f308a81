"""Objects over the agent's real API socket: statuses, error bodies, preconditions, dry runs."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from podwire.model.store import Store
from tests.fakes.node import FakeNode
from tests.unit.policies import cidr_group, namespace_object, network_policy
from tests.unit.test_rest import Answer, Served, serving

WEB = "/object/networkpolicies/default/web"


@pytest.fixture
async def served(tmp_path: Path, node: FakeNode, store: Store) -> AsyncIterator[Served]:
    async with serving(tmp_path, node, store=store) as api:
        yield api


async def ask(served: Served, method: str, path: str, body: Any = None) -> Answer:
    raw = b"" if body is None else json.dumps(body).encode()
    return await served.ask(method, "/v1" + path, raw)


def revision_of(served: Served) -> int:
    return served.api.store.list("workloads")[1]


async def test_an_object_is_put_shown_listed_and_deleted(served: Served) -> None:
    put = await ask(served, "PUT", WEB, network_policy())
    assert put.status == 200
    assert put.json["metadata"]["resourceVersion"] == "1"
    assert (await served.get(WEB)).json == put.json
    listed = (await served.get("/object/networkpolicies")).json
    assert (listed["kind"], listed["apiVersion"]) == ("List", "v1")
    assert listed["metadata"] == {"resourceVersion": "1"}
    assert listed["items"] == [put.json]
    assert (await served.get("/object/networkpolicies?namespace=x")).json["items"] == []
    gone = await ask(served, "DELETE", WEB)
    assert gone.json["action"] == "deleted"
    assert (await served.get(WEB)).status == 404
    assert (await ask(served, "DELETE", WEB)).status == 404


@pytest.mark.parametrize(
    "path",
    ["/object/networkpolicies/web", "/object/netpol/default/web", "/object/NetworkPolicy/web"],
)
async def test_the_namespace_may_be_left_out_and_the_kind_be_short(
    served: Served, path: str
) -> None:
    await ask(served, "PUT", WEB, network_policy())
    assert (await served.get(path)).status == 200


async def test_a_dry_run_answers_and_writes_nothing(served: Served) -> None:
    assert (await ask(served, "PUT", WEB + "?dryRun=1", network_policy())).status == 200
    [one] = (await ask(served, "POST", "/apply?dryRun=1", [network_policy()])).json
    assert (one["action"], one["before"], one["after"]["kind"]) == (
        "created",
        None,
        "NetworkPolicy",
    )
    assert revision_of(served) == 0
    await ask(served, "PUT", WEB, network_policy())
    assert (await ask(served, "DELETE", WEB + "?dryRun=1")).json["action"] == "deleted"
    assert revision_of(served) == 1


async def test_apply_writes_all_and_says_what_became_of_each(served: Served) -> None:
    documents = [network_policy("a", "shop"), namespace_object("shop"), network_policy("b", None)]
    done = (await ask(served, "POST", "/apply?namespace=shop", documents)).json
    assert [
        (applied["kind"], applied["namespace"], applied["name"], applied["action"])
        for applied in done
    ] == [
        ("networkpolicies", "shop", "a", "created"),
        ("namespaces", "", "shop", "created"),
        ("networkpolicies", "shop", "b", "created"),
    ]
    assert all(applied["before"] is None and applied["after"] is None for applied in done)


async def test_apply_with_faults_names_every_one_and_writes_nothing(served: Served) -> None:
    documents = [network_policy(), network_policy("b", ingress=[{"ports": [{"port": 0}]}]), 7]
    answer = await ask(served, "POST", "/apply", documents)
    assert answer.status == 400
    assert [fault["path"] for fault in answer.json["error"]["faults"]] == [
        "documents[1].spec.ingress[0].ports[0].port",
        "documents[2]",
    ]
    assert answer.json["error"]["code"] == "invalid"
    assert revision_of(served) == 0


REFUSED: dict[str, tuple[str, str, Any, int, str]] = {
    "an unknown kind": ("GET", "/object/gadgets", None, 404, "no such kind"),
    "an unknown kind of one": ("PUT", "/object/gadgets/a", network_policy(), 404, "no such kind"),
    "a namespace where there is none": ("GET", "/object/ccg/x/a", None, 404, "have no namespace"),
    "another name": ("PUT", "/object/netpol/other", network_policy(), 400, "metadata.name"),
    "another kind": ("PUT", "/object/ccg/web", network_policy(), 400, "not of ciliumcidrgroups"),
    "a body that is a list": ("PUT", WEB, [], 400, "Expected `object`"),
    "no body": ("PUT", WEB, None, 400, "read the request's body"),
    "documents that are no list": ("POST", "/apply", {}, 400, "Expected `array`"),
    "an identity": (
        "PUT",
        "/object/identities/70000",
        {"apiVersion": "podwire.io/v1", "kind": "Identity", "metadata": {"name": "70000"}},
        400,
        "agents make these",
    ),
    "an unknown parameter": ("GET", WEB + "?watch=1", None, 400, "is not a parameter here"),
    "a wrong parameter": (
        "PUT",
        WEB + "?dryRun=maybe",
        network_policy(),
        400,
        "not true or false",
    ),
    "another method": ("POST", WEB, network_policy(), 405, "is not possible"),
    "a missing namespace": (
        "PUT",
        "/object/netpol/nowhere/web",
        network_policy(namespace="nowhere"),
        400,
        "does not exist",
    ),
    "the default namespace": ("DELETE", "/object/namespaces/default", None, 404, "there is none"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_says_why(served: Served, name: str) -> None:
    method, path, body, status, expected = REFUSED[name]
    answer = await ask(served, method, path, body)
    assert answer.status == status
    error = answer.json["error"]
    assert expected in json.dumps(error)
    assert error["message"]
    assert revision_of(served) == 0


async def test_a_precondition_that_does_not_hold_is_a_conflict(served: Served) -> None:
    first = (await ask(served, "PUT", WEB, network_policy())).json
    assert (await ask(served, "PUT", WEB, network_policy(ingress=[]))).status == 200
    answer = await ask(served, "PUT", WEB, {**first, "spec": network_policy(egress=[])["spec"]})
    assert (answer.status, answer.json["error"]["code"]) == (409, "conflict")
    assert revision_of(served) == 2


async def test_a_namespace_in_use_is_a_conflict(served: Served) -> None:
    await ask(served, "POST", "/apply", [namespace_object("x"), network_policy("a", "x")])
    assert (await ask(served, "DELETE", "/object/ns/x")).status == 409


async def test_a_store_that_cannot_be_used_is_said_to_be_so(served: Served, tmp_path: Path) -> None:
    await ask(served, "PUT", "/object/ccg/office", cidr_group())
    (tmp_path / "store.db").rename(tmp_path / "away.db")
    answer = await served.get("/object/ccg")
    assert (answer.status, answer.json["error"]["code"]) == (507, "io")
    assert "removed while it was open" in answer.json["error"]["message"]


async def test_the_description_has_every_operation_on_objects(served: Served) -> None:
    paths = (await served.get("/openapi.json")).json["paths"]
    assert set(paths["/v1/object/{kind}/{namespace}/{name}"]) == {"get", "put", "delete"}
    assert set(paths["/v1/object/{kind}/{name}"]) == {"get", "put", "delete"}
    assert set(paths["/v1/object/{kind}"]) == {"get"}
    assert set(paths["/v1/apply"]) == {"post"}

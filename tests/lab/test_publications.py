"""A node that publishes what is not its own: the others' hosts keep their ways, and their status names that node.

Its objects are written as its own credentials could write them, while its agent is stopped.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import pytest

from podwire.control.cluster.facts import node_key
from podwire.control.cluster.published import endpoints_key
from podwire.control.documents.apply import apply_documents
from podwire.kernel import netns
from podwire.lab import etcd, labs, traffic
from podwire.lab.topology import UNDERLAYS
from podwire.model.errors import Unavailable
from podwire.model.store import ObjectKey, Store, StoredObject
from podwire.store.open import open_store
from tests.lab.labrig import Lab
from tests.lab.rig import run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

LIAR: Final = "node3"
OTHERS: Final = ("node1", "node2")
ATTEMPTS: Final = 5
_T = TypeVar("_T")


def host(index: int, family: int = 0) -> str:
    """Give an address of the nodes' own subnet."""
    return str(UNDERLAYS[0][family][index])


@dataclass(frozen=True)
class Lie:
    """What the liar publishes beside what is its own, or in its place."""

    target: str
    """An address that others would reach by it."""
    ranges: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def tell(self, kind: str, truth: Mapping[str, Any]) -> dict[str, Any]:
        """Give the document of its Node or its NodeEndpoints."""
        document = copy.deepcopy(dict(truth))
        spec = document["spec"]
        if kind == "nodes":
            spec["podCIDRs"] += self.ranges
            spec["addresses"] = list(self.addresses) or spec["addresses"]
        else:
            spec["sequence"] += 1000
            spec["others"] = [f"{pod}=70000" for pod in self.pods]
        return document


def tell_truth(kind: str, truth: Mapping[str, Any]) -> dict[str, Any]:
    """Give the document that was there before the lie; as news, where an older one would be an echo."""
    document = copy.deepcopy(dict(truth))
    if kind == "nodeendpoints":
        document["spec"]["epoch"] += 1
    return document


LIES: Final = {
    "an address on the link, as a pod's": Lie(host(250), pods=(host(250),)),
    "an IPv6 address on the link, as a pod's": Lie(host(250, 1), pods=(host(250, 1),)),
    "an address of the world, as a pod's": Lie("8.8.8.8", pods=("8.8.8.8",)),
    "a large part of the world": Lie("8.8.8.8", ranges=("8.0.0.0/8",)),
    "a part of the link": Lie(host(250), ranges=(host(248) + "/29",)),
    "the address of another node, as a pod's": Lie(host(11), pods=(host(11),)),
    "the address of another node, as a range": Lie(host(11), ranges=(host(11) + "/32",)),
    "the store's address": Lie(host(240), pods=(host(240),)),
    "the store's address, as a range": Lie(host(240), ranges=(host(240) + "/32",)),
    "an address of another node's pods, as its own": Lie("10.244.2.9", addresses=("10.244.2.9",)),
    "a multicast address, as a pod's": Lie("224.0.0.9", pods=("224.0.0.9",)),
    "the address of another node, with a scope": Lie(host(11, 1), addresses=(f"{host(11, 1)}%x",)),
    "the address of another node, as IPv6": Lie(host(11), addresses=(f"::ffff:{host(11)}",)),
    "a range with a scope": Lie("fd10:244:0:7::", ranges=("fd10:244:0:7::%x/64",)),
    "the broadcast address of the link": Lie(host(255), addresses=(host(255),)),
    "the pods' gateway": Lie("169.254.1.1", pods=("169.254.1.1",)),
}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two nodes that listen, and the liar, whose agent is stopped."""
    etcd.require_program()
    lab = Lab(nodes=3, routing="overlay", store="etcd")
    try:
        for name, node in zip("abc", (*OTHERS, LIAR), strict=True):
            labs.run(lab.name, name, node)
        wait_for(lambda: identities(lab, "node1") >= 3, "all pods to be known")
        labs.change_agent(lab.name, LIAR, "stop")
        yield lab
    finally:
        lab.close()


def identities(lab: Lab, node: str) -> int:
    """Tell how many addresses of other nodes' pods a node knows, its own among them."""
    rows = lab.get("/map/ipcache?limit=1000", node)["rows"]
    return sum(row["prefix"].endswith("/32") for row in rows)


def ask_store(lab: Lab, action: Callable[[Store], _T]) -> _T:
    """Do something with the lab's etcd, where it is reached; again, where a machine stood still meanwhile."""

    def ask() -> _T:
        with contextlib.closing(open_store(lab.state.plan.store_url)) as store:
            return action(store)

    with netns.open_namespace(netns.named_path(lab.state.plan.underlay_namespace)) as there:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Unavailable):
                return netns.run_in(there.fileno(), ask)
    raise AssertionError("the lab's etcd does not answer")


def read(store: Store, key: ObjectKey) -> StoredObject:
    """Give what must be there."""
    found = store.get(key)
    assert found is not None
    return found


@contextlib.contextmanager
def told(lab: Lab, lie: Lie) -> Iterator[None]:
    """Have the liar publish a lie, and the truth again in the end."""
    keys = (node_key(LIAR), endpoints_key(LIAR))
    truth = ask_store(lab, lambda store: [read(store, key) for key in keys])

    def write(change: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> None:
        def write_all(store: Store) -> None:
            for stored in truth:
                now = read(store, stored.key)
                document = change(stored.key.kind, stored.document)
                store.update(msgspec.structs.replace(now, document=document))

        ask_store(lab, write_all)

    write(lie.tell)
    try:
        yield
    finally:
        write(tell_truth)
        for node in OTHERS:
            wait_for(lambda node=node: not blamed(lab, node), f"{node} to see that it is right")  # type: ignore[misc]


def blamed(lab: Lab, node: str) -> list[str]:
    """Give what a node's status says about the liar, but that its agent does not live."""
    found = lab.get("/status", node)["warnings"]
    return [warning for warning in found if LIAR in warning and "no agent is alive" not in warning]


def way_to(lab: Lab, node: str, target: str) -> str:
    """Give the device by which a node's host reaches an address."""
    words = run("ip", "-n", lab.node(node).namespace, "route", "get", target, check=False).split()
    return words[words.index("dev") + 1] if "dev" in words else ""


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_redirects_nobody_and_the_liar_is_named(lab: Lab, lie: Lie) -> None:
    before = {node: way_to(lab, node, lie.target) for node in OTHERS}
    rows = {node: row_of(lab, node, lie.target) for node in OTHERS}
    with told(lab, lie):
        for node in OTHERS:
            wait_for(
                lambda node=node: (  # type: ignore[misc]
                    blamed(lab, node)
                    or way_to(lab, node, lie.target) != before[node]
                    or row_of(lab, node, lie.target) != rows[node]
                ),
                f"{node} to hear of it",
            )
            assert way_to(lab, node, lie.target) == before[node]
            assert row_of(lab, node, lie.target) == rows[node]
            said = wait_for(lambda node=node: blamed(lab, node), f"{node} to name {LIAR}")  # type: ignore[misc]
            assert any(lie.target in warning or one_of(lie.ranges, warning) for warning in said), (
                said
            )
        # Whoever says of itself that it is elsewhere is not reached; nobody else loses anything.
        assert_all_is_well(lab, with_liar=not lie.addresses)


def one_of(texts: tuple[str, ...], line: str) -> bool:
    """Tell whether a line has one of some texts."""
    return any(text in line for text in texts)


def row_of(lab: Lab, node: str, address: str) -> object:
    """Give what a node's programs have for exactly this address, or for a range of the world."""
    length = 128 if ":" in address else 32
    rows = lab.get("/map/ipcache?limit=1000", node)["rows"]
    wanted = {f"{address}/{length}", "8.0.0.0/8", host(248) + "/29"}
    return sorted(
        (row["prefix"], row["identity"], row["node"]) for row in rows if row["prefix"] in wanted
    )


def assert_all_is_well(lab: Lab, *, with_liar: bool) -> None:
    """Controls: the store is followed, and pods of all nodes, the liar's own among them, are reached."""
    to_liar = (("a", "c"), ("b", "c")) if with_liar else ()
    for source, target in (("a", "b"), ("b", "a"), *to_liar):
        namespace, _ = labs.locate(lab.state, source)
        for address in labs.find_addresses(lab.state, target):
            wait_for(
                lambda namespace=namespace, address=address: (  # type: ignore[misc]
                    traffic.ping(namespace, address, timeout_s=5).ok
                ),
                f"an echo of {target} at {address} for {source}",
            )
    for node in OTHERS:
        wait_for(
            lambda node=node: (  # type: ignore[misc]
                traffic.ping(lab.node(node).namespace, host(250), timeout_s=5).ok
            ),
            f"an echo of the link for {node}",
        )
        wait_for(lambda node=node: is_followed(lab, node), f"{node} to follow the store")  # type: ignore[misc]


def is_followed(lab: Lab, node: str) -> bool:
    """Tell whether a node says that it follows the store."""
    checks = {check["name"]: check["ok"] for check in lab.get("/status", node)["checks"]}
    return bool(checks["store"])


def test_a_pool_that_comes_later_makes_what_was_refused_right(lab: Lab) -> None:
    """And one that goes withdraws nothing, also not across a restart of the agent that believes."""
    address = "10.99.0.9"
    pool = {
        "apiVersion": "podwire.io/v1",
        "kind": "IPPool",
        "metadata": {"name": "later"},
        "spec": {"cidr": "10.99.0.0/24"},
    }
    with told(lab, Lie(address, pods=(address,))):
        for node in OTHERS:
            wait_for(lambda node=node: blamed(lab, node), "it to be refused")  # type: ignore[misc]
        ask_store(lab, lambda store: apply_documents(store, [pool]))
        for node in OTHERS:
            wait_for(lambda node=node: not blamed(lab, node), "it to be believed")  # type: ignore[misc]
            wait_for(lambda node=node: row_of(lab, node, address), "its row")  # type: ignore[misc]
        ask_store(lab, lambda store: store.delete(ObjectKey("ippools", "", "later")))
        labs.change_agent(lab.name, "node1", "kill")
        labs.change_agent(lab.name, "node1", "start")
        for node in OTHERS:
            assert not blamed(lab, node)
            assert row_of(lab, node, address)
            assert way_to(lab, node, address) == "pw-tunnel"
    for node in OTHERS:
        wait_for(lambda node=node: not row_of(lab, node, address), "what is not published to go")  # type: ignore[misc]

"""The calls of CRI-O, replayed as they were recorded from 1.37: the only runtime that uses CHECK and GC.

CRI-O itself is in no Debian release that we support; its sequence, environment and configuration are what is tested.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.lab.rig import Outcome, Present, Rig, run

DUMMY = {
    "CNI_CONTAINERID": "dummy",
    "CNI_NETNS": "dummy",
    "CNI_IFNAME": "dummy",
    "CNI_ARGS": "dummy",
}
EMPTY = dict.fromkeys(DUMMY, "")


@pytest.fixture
def node() -> Iterator[Rig]:
    with Rig() as made:
        made.start()
        try:
            yield made
        finally:
            print(made.log_tail(40))  # shown when the test failed


def pod_arguments(container: str, pod: str) -> dict[str, str]:
    """Give CNI_ARGS as CRI-O writes them."""
    pairs = {
        "IgnoreUnknown": "1",
        "K8S_POD_NAMESPACE": "shop",
        "K8S_POD_NAME": pod,
        "K8S_POD_INFRA_CONTAINER_ID": container,
        "K8S_POD_UID": f"uid-{pod}",
    }
    return {"CNI_ARGS": ";".join(f"{key}={value}" for key, value in pairs.items())}


def add(node: Rig, container: str, pod: str) -> tuple[str, Mapping[str, Any]]:
    """ADD, and at once CHECK with what ADD answered; gives namespace and result."""
    namespace = node.make_pod_namespace()
    added = node.cni("ADD", container, namespace, environment=pod_arguments(container, pod))
    assert added.ok, added.document
    assert check(node, container, namespace, added.document).ok
    return namespace, added.document


def check(node: Rig, container: str, namespace: str, result: Mapping[str, Any]) -> Outcome:
    """CHECK an attachment."""
    config = {"prevResult": result}
    return node.cni("CHECK", container, namespace, config=config, environment={"CNI_ARGS": ""})


def collect(node: Rig, living: list[str] | None) -> Outcome:
    """GC with both keys; None is what CRI-O writes when nothing lives."""
    attachments = None
    if living is not None:
        attachments = [{"containerID": container_id, "ifname": "eth0"} for container_id in living]
    config = {"cni.dev/attachments": attachments, "cni.dev/valid-attachments": attachments}
    return node.cni("GC", config=config, environment=EMPTY)


def test_the_calls_at_start_succeed_on_an_empty_node(node: Rig) -> None:
    version = node.cni("VERSION", environment=DUMMY)
    assert "1.1.0" in version.document["supportedVersions"]
    assert node.cni("STATUS", environment=EMPTY).ok
    assert collect(node, None).ok


def test_every_pod_passes_check_right_after_add_and_after_a_restart(node: Rig) -> None:
    pods = {f"c{number}": add(node, f"c{number}", f"p{number}") for number in range(4)}
    node.kill()
    node.start()
    assert collect(node, list(pods)).ok
    for container, (namespace, result) in pods.items():
        outcome = check(node, container, namespace, result)
        assert outcome.ok, outcome.document
    assert len(node.assert_consistent().records) == 4


def test_gc_ends_what_a_lost_del_left_and_nothing_else(node: Rig) -> None:
    pods = {f"c{number}": add(node, f"c{number}", f"p{number}") for number in range(3)}
    node.remove_namespace(pods["c1"][0])
    assert collect(node, ["c0", "c2"]).ok
    node.settle()
    records = node.assert_consistent().records.values()
    assert {record["key"]["container_id"] for record in records} == {"c0", "c2"}
    for container in ("c0", "c2"):
        assert check(node, container, *pods[container]).ok
    assert check(node, "c1", *pods["c0"]).document["code"] == 3
    assert collect(node, None).ok
    node.settle()
    assert node.assert_consistent() == Present()


def test_check_names_what_somebody_changed(node: Rig) -> None:
    namespace, result = add(node, "c0", "p0")
    [address] = [ip["address"] for ip in result["ips"] if "." in ip["address"]]
    run("ip", "-n", namespace, "address", "del", address, "dev", "eth0")
    outcome = check(node, "c0", namespace, result)
    assert not outcome.ok
    assert address.partition("/")[0] in outcome.document["msg"]

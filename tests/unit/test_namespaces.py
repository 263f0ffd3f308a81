"""Namespaces of pods: an ADD may name those that objects can name, and no others."""

import json

import pytest

from podwire.cni.errors import code_of
from podwire.cni.netconf import decode_request
from podwire.control.documents.kinds import decode
from podwire.model.errors import InvalidConfiguration, InvalidRequest
from podwire.model.ids import is_valid_namespace
from podwire.model.request import AttachRequest

NAMES: list[tuple[str, bool]] = [
    ("default", True),
    ("shop-2", True),
    ("0", True),
    ("a" * 63, True),
    ("a" * 64, False),
    ("A_B", False),
    ("Shop", False),
    ("shop.eu", False),
    ("-shop", False),
    ("shop-", False),
]


def call(command: str, args: str) -> AttachRequest:
    """Decode a call about one container with `args` as CNI_ARGS."""
    environment = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": "/var/run/netns/c1",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
        "CNI_ARGS": args,
    }
    config: dict[str, object] = {"cniVersion": "1.1.0", "name": "podwire", "type": "podwire-cni"}
    if command == "CHECK":
        config |= {"prevResult": {}}
    return decode_request(environment, json.dumps(config).encode(), 1)


@pytest.mark.parametrize(("name", "is_valid"), NAMES)
def test_objects_and_pods_agree_on_what_a_namespace_may_be_called(
    name: str, is_valid: bool
) -> None:
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    assert is_valid_namespace(name) == is_valid
    if is_valid:
        assert decode(document).key.name == name
        assert call("ADD", f"K8S_POD_NAMESPACE={name}").namespace == name
        return
    with pytest.raises(InvalidRequest, match="not a name"):
        decode(document)
    with pytest.raises(InvalidRequest, match="K8S_POD_NAMESPACE"):
        call("ADD", f"K8S_POD_NAMESPACE={name}")


def test_a_pod_whose_namespace_no_object_can_have_is_told_what_to_do() -> None:
    with pytest.raises(InvalidConfiguration, match=r"A_B.*: give it a name of a-z") as caught:
        call("ADD", "K8S_POD_NAMESPACE=A_B")
    assert code_of(caught.value) == 7


@pytest.mark.parametrize("args", ["", "K8S_POD_NAMESPACE="])
def test_a_pod_that_names_no_namespace_is_in_default(args: str) -> None:
    assert call("ADD", args).namespace == "default"


@pytest.mark.parametrize("command", ["DEL", "CHECK", "GC"])
def test_whatever_was_attached_can_be_checked_and_ended(command: str) -> None:
    assert call(command, "K8S_POD_NAMESPACE=A_B").command == command

"""What a runtime meets: every command and every fault of the CNI door, through the real launcher on a lab's node."""

import contextlib
import ipaddress
import json
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.lab.labrig import Answer, Lab, finish
from tests.lab.rig import run
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
Breaker = Callable[[Lab, "Pod"], object]


class Pod:
    """One attachment as a runtime knows it."""

    def __init__(self, lab: Lab, container: str, **more: Any) -> None:
        self.lab = lab
        self.container = container
        self.namespace = lab.namespace()
        self.more = more
        self.result = self.call("ADD")
        assert self.result.status == 0, self.result.document
        self.endpoint = wait_for(lambda: lab.endpoints().get(container), f"endpoint {container}")
        self.device: str = self.endpoint["hostInterface"]

    def call(self, command: str, **more: Any) -> Answer:
        """Call the launcher for this attachment."""
        return self.lab.cni(command, self.container, self.namespace, **(self.more | more))

    def check(self) -> Answer:
        """CHECK as a runtime does it: with the result it remembers."""
        config = {**self.more.get("config", {}), "prevResult": self.result.document}
        return self.call("CHECK", config=config)

    def ip(self, *arguments: str) -> str:
        """Run `ip` inside the pod."""
        return run("ip", "-n", self.namespace, *arguments)

    def node_ip(self, *arguments: str) -> str:
        """Run `ip` on the pod's node."""
        return run("ip", "-n", self.lab.node().namespace, *arguments)

    @property
    def ipv4(self) -> str:
        """Its IPv4 address."""
        return str(self.endpoint["ipv4"])

    @property
    def ipv6(self) -> str:
        """Its IPv6 address."""
        return str(self.endpoint["ipv6"])


@pytest.fixture(scope="module", autouse=True)
def nothing_left(node_lab: Lab) -> Iterator[None]:
    """After all tests of this file the shared node must look as before them."""
    with node_lab.nothing_left():
        yield


@pytest.fixture
def lab(node_lab: Lab) -> Iterator[Lab]:
    """The shared node; whatever the test attached is ended."""
    yield node_lab
    for network in {endpoint["network"] for endpoint in node_lab.endpoints().values()}:
        config = {"name": network, "cni.dev/valid-attachments": []}
        assert node_lab.cni("GC", config=config).status == 0


# ADD


@pytest.mark.parametrize("version", VERSIONS)
def test_add_answers_in_the_asked_version_with_what_the_pod_really_has(
    lab: Lab, version: str
) -> None:
    pod = Pod(lab, "shape", config={"cniVersion": version})
    document = pod.result.document
    assert document["cniVersion"] == version
    if version < "0.3.0":
        found = [document["ip4"]["ip"], document["ip6"]["ip"]]
    else:
        found = [ip["address"] for ip in document["ips"]]
        assert all(("version" in ip) == (version < "1.0.0") for ip in document["ips"])
        names = [interface["name"] for interface in document["interfaces"]]
        assert names == [pod.device, "eth0"]
        assert document["interfaces"][1]["sandbox"] == f"/run/netns/{pod.namespace}"
        assert {ip["interface"] for ip in document["ips"]} == {1}
        assert {route["dst"] for route in document["routes"]} == {"0.0.0.0/0", "::/0"}
    assert found == [f"{pod.ipv4}/32", f"{pod.ipv6}/128"]
    inside = json.loads(pod.ip("-j", "addr", "show", "dev", "eth0"))[0]
    assert {
        address["local"] for address in inside["addr_info"] if address["scope"] == "global"
    } == {
        pod.ipv4,
        pod.ipv6,
    }
    assert inside["address"] == pod.endpoint["podMac"]
    assert pod.call("DEL", config={"cniVersion": version}).status == 0


@pytest.mark.parametrize("version", VERSIONS[4:])
def test_check_passes_right_after_add(lab: Lab, version: str) -> None:
    pod = Pod(lab, "checked", config={"cniVersion": version})
    assert pod.check().document == {}


def test_errors_come_in_the_asked_version(lab: Lab) -> None:
    answer = lab.cni("ADD", "no-ns", "", config={"cniVersion": "0.4.0"})
    assert (answer.status, answer.code, answer.document["cniVersion"]) == (1, 4, "0.4.0")


def test_version_names_all_versions(lab: Lab) -> None:
    document = lab.cni("VERSION").document
    assert tuple(document["supportedVersions"]) == VERSIONS


# CHECK names what is broken


def _remove_program(direction: str) -> Breaker:
    def remove(lab: Lab, pod: Pod) -> None:
        run("tc", "-n", lab.node().namespace, "filter", "del", "dev", pod.device, direction)

    return remove


def _remove_row(name: str, key: Callable[[Pod], bytes]) -> Breaker:
    def remove(lab: Lab, pod: Pod) -> None:
        [path] = lab.node().pins.glob(f"v*/maps/{name}")
        octets = [f"0x{octet:02x}" for octet in key(pod)]
        run("bpftool", "map", "delete", "pinned", str(path), "key", *octets)

    return remove


def _mapped(pod: Pod) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes(map(int, pod.ipv4.split(".")))


def _index(pod: Pod) -> bytes:
    return int(pod.endpoint["hostIfIndex"]).to_bytes(4, "little")


BREAKERS: dict[str, tuple[Breaker, str]] = {
    "the namespace": (lambda _, pod: run("ip", "netns", "del", pod.namespace), "namespace"),
    "the host device": (lambda _, pod: pod.node_ip("link", "del", pod.device), "device"),
    "the host device is down": (
        lambda _, pod: pod.node_ip("link", "set", pod.device, "down"),
        r"down|up",
    ),
    "the pod's device is down": (lambda _, pod: pod.ip("link", "set", "eth0", "down"), r"down|up"),
    "the pod's IPv4 address": (
        lambda _, pod: pod.ip("addr", "del", f"{pod.ipv4}/32", "dev", "eth0"),
        "IPV4",
    ),
    "the pod's IPv6 address": (
        lambda _, pod: pod.ip("addr", "del", f"{pod.ipv6}/128", "dev", "eth0"),
        "IPV6",
    ),
    "the pod's default route": (
        lambda _, pod: pod.ip("route", "del", "default"),
        r"route.*0\.0\.0\.0/0|default",
    ),
    "the pod's IPv6 default route": (
        lambda _, pod: pod.ip("-6", "route", "del", "default"),
        r"route.*::/0|default",
    ),
    "the pod's gateway route": (
        lambda _, pod: pod.ip("route", "flush", "exact", "169.254.1.1"),
        r"169\.254\.1\.1",
    ),
    "the pod's neighbour": (
        lambda _, pod: pod.ip("neigh", "del", "169.254.1.1", "dev", "eth0"),
        r"neighbour.*169\.254\.1\.1",
    ),
    "the pod's IPv6 neighbour": (
        lambda _, pod: pod.ip("-6", "neigh", "del", "fe80::1", "dev", "eth0"),
        r"neighbour.*fe80::1",
    ),
    "the host's route": (lambda _, pod: pod.node_ip("route", "del", pod.ipv4), "route.*IPV4"),
    "the host's IPv6 route": (
        lambda _, pod: pod.node_ip("-6", "route", "del", pod.ipv6),
        "route.*IPV6",
    ),
    "the host's neighbour": (
        lambda _, pod: pod.node_ip("neigh", "del", pod.ipv4, "dev", pod.device),
        "neighbour.*IPV4",
    ),
    "the pod's MTU": (lambda _, pod: pod.ip("link", "set", "eth0", "mtu", "1400"), "mtu is 1400"),
    "the route's MTU": (
        lambda _, pod: pod.ip(
            *("route", "change", "default", "via", "169.254.1.1", "dev", "eth0"),
            *("onlink", "proto", "199", "mtu", "1300"),
        ),
        "another mtu",
    ),
    "the pod's loopback": (lambda _, pod: pod.ip("link", "set", "lo", "down"), "'lo'"),
    "the host device's MTU": (
        lambda _, pod: pod.node_ip("link", "set", pod.device, "mtu", "1400"),
        "mtu is 1400",
    ),
    "the pod's MAC": (
        lambda _, pod: pod.ip("link", "set", "eth0", "address", "02:00:00:00:00:77"),
        "MAC|02:00:00:00:00:77",
    ),
    "the program from_pod": (_remove_program("ingress"), "from_pod|ingress"),
    "the program to_pod": (_remove_program("egress"), "to_pod|egress"),
    "the row of the device": (_remove_row("pw_config", _index), "row of device"),
    "the row of the address": (_remove_row("pw_endpoints", _mapped), "endpoints.*IPV4|IPV4"),
}


@pytest.mark.parametrize("what", BREAKERS)
def test_check_names_what_differs(lab: Lab, what: str) -> None:
    pod = Pod(lab, "broken")
    breaker, words = BREAKERS[what]
    wanted = words.replace("IPV4", re.escape(pod.ipv4)).replace("IPV6", re.escape(pod.ipv6))
    breaker(lab, pod)

    def found() -> Answer | None:
        """What the agent repaired before it was asked is broken again."""
        answer = pod.check()
        if answer.status == 0:
            with contextlib.suppress(AssertionError):  # still broken
                breaker(lab, pod)
            return None
        assert answer.code == 104, answer.document
        return answer if re.search(wanted, answer.text) else None

    answer = wait_for(found, f"a CHECK that tells {wanted!r}")
    assert "DEL" in answer.text  # what to do
    assert pod.call("DEL").status == 0


def test_check_names_a_mark_that_was_changed(lab: Lab) -> None:
    pod = Pod(lab, "marked")
    alias = next(device["ifalias"] for device in lab.devices() if device["ifname"] == pod.device)
    pod.node_ip("link", "set", pod.device, "alias", "somebody's")
    answer = pod.check()
    pod.node_ip("link", "set", pod.device, "alias", alias)
    assert answer.code == 104
    assert pod.device in answer.text
    assert pod.check().status == 0


def test_check_of_what_was_never_added_is_unknown(lab: Lab) -> None:
    answer = lab.cni("CHECK", "never", lab.namespace(), config={"prevResult": _RESULT})
    assert answer.code == 3


_RESULT = {"cniVersion": "1.1.0", "interfaces": [], "ips": [], "routes": [], "dns": {}}


def test_check_names_an_address_that_the_runtime_remembers_differently(lab: Lab) -> None:
    pod = Pod(lab, "memory")
    result = json.loads(json.dumps(pod.result.document).replace(pod.ipv4, "10.244.1.250"))
    answer = pod.call("CHECK", config={"prevResult": result})
    assert answer.code == 104
    assert pod.ipv4 in answer.text


# DEL


def test_del_succeeds_with_the_namespace_gone(lab: Lab) -> None:
    pod = Pod(lab, "gone")
    run("ip", "netns", "del", pod.namespace)
    assert pod.call("DEL").document == {}


def test_del_succeeds_without_a_namespace_path_and_again(lab: Lab) -> None:
    pod = Pod(lab, "empty")
    for _ in range(3):
        assert lab.cni("DEL", pod.container, "").status == 0
    lab.settled()
    assert pod.container not in lab.endpoints()


def test_del_of_what_was_never_added_succeeds(lab: Lab) -> None:
    assert lab.cni("DEL", "never", lab.namespace()).status == 0


def test_del_ends_only_its_own_interface(lab: Lab) -> None:
    pod = Pod(lab, "two")
    assert pod.call("ADD", if_name="net1").status == 0
    assert pod.call("DEL").status == 0
    lab.settled()
    assert lab.endpoints()["two"]["ifName"] == "net1"


def test_late_del_of_a_replaced_container_leaves_its_successor(lab: Lab) -> None:
    args = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;IgnoreUnknown=1"
    old = Pod(lab, "old", args=args)
    new = Pod(lab, "new", args=args)
    assert old.call("DEL").status == 0
    lab.settled()
    assert new.check().status == 0
    assert lab.cli("endpoint", "get", "shop/web", "-o", "json").document["containerId"] == "new"


# The same key again


def test_second_add_is_refused_and_leaves_the_first_as_it_was(lab: Lab) -> None:
    pod = Pod(lab, "again")
    with lab.nothing_left():
        answer = pod.call("ADD")
        assert answer.code == 7
        assert "DEL first" in answer.text
    assert pod.check().status == 0


def test_a_container_that_stops_and_starts_keeps_its_id(lab: Lab) -> None:
    namespace = lab.namespace()
    for _ in range(8):
        assert (answer := lab.cni("ADD", "podman", namespace)).status == 0, answer.document
        assert lab.cni("DEL", "podman", namespace).status == 0
        run("ip", "netns", "del", namespace)
        namespace = lab.namespace()


def test_several_networks_in_one_container(lab: Lab) -> None:
    first = Pod(lab, "many")
    second = first.call("ADD", if_name="net1", config={"name": "backend"})
    third = first.call("ADD", if_name="net2", config={"name": "storage"})
    assert (second.status, third.status) == (0, 0)
    addresses = {*first.result.addresses, *second.addresses, *third.addresses}
    assert len(addresses) == 6
    assert lab.cni("GC", config={"name": "backend", "cni.dev/valid-attachments": []}).status == 0
    lab.settled()
    left = {endpoint["ifName"] for endpoint in lab.list_endpoints()}
    assert left == {"eth0", "net2"}
    assert first.call("DEL", if_name="net2", config={"name": "storage"}).status == 0


# GC and STATUS


@pytest.mark.parametrize("key", ["cni.dev/valid-attachments", "cni.dev/attachments"])
def test_gc_keeps_what_the_runtime_names(lab: Lab, key: str) -> None:
    kept = Pod(lab, "kept")
    Pod(lab, "lost")
    valid = [{"containerID": "kept", "ifname": "eth0"}]
    assert lab.cni("GC", config={key: valid}).status == 0
    lab.settled()
    assert list(lab.endpoints()) == ["kept"]
    assert kept.check().status == 0


@pytest.mark.parametrize(
    ("config", "left"),
    [
        pytest.param({"cni.dev/valid-attachments": []}, [], id="an empty list ends all"),
        pytest.param(
            {"cni.dev/valid-attachments": None}, [], id="null is how Go writes an empty list"
        ),
        pytest.param({}, ["one"], id="no list says nothing"),
        pytest.param(
            {"name": "other", "cni.dev/valid-attachments": []}, ["one"], id="another network"
        ),
        pytest.param(
            {"cni.dev/valid-attachments": [{"containerID": "one", "ifname": "net9"}]},
            [],
            id="another interface",
        ),
    ],
)
def test_gc_ends_what_the_list_does_not_name(
    lab: Lab, config: dict[str, Any], left: list[str]
) -> None:
    Pod(lab, "one")
    answer = lab.cni("GC", config=config)
    assert answer.status == 0, answer.document
    lab.settled()
    assert list(lab.endpoints()) == left


def test_status_is_fine(lab: Lab) -> None:
    assert lab.cni("STATUS").document == {}


# Fixed addresses


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param({"config": {"args": {"cni": {"ips": ["10.244.1.77"]}}}}, id="args"),
        pytest.param({"config": {"runtimeConfig": {"ips": ["10.244.1.77/24"]}}}, id="capability"),
        pytest.param({"args": "IP=10.244.1.77"}, id="CNI_ARGS"),
    ],
)
def test_a_fixed_address_is_given(lab: Lab, wish: dict[str, Any]) -> None:
    pod = Pod(lab, "fixed", **wish)
    assert pod.ipv4 == "10.244.1.77"
    assert pod.ipv6  # the family that was not asked for is still served
    assert pod.check().status == 0
    taken = lab.cni("ADD", "late", lab.namespace(), **wish)
    assert taken.code == 101
    assert "10.244.1.77" in taken.text


@pytest.mark.parametrize(
    ("ip", "code"),
    [
        pytest.param("10.9.9.9", 101, id="outside"),
        pytest.param("fd11::5", 101, id="outside, IPv6"),
        pytest.param("not-an-address", 7, id="no address"),
    ],
)
def test_a_fixed_address_that_cannot_be_is_refused(lab: Lab, ip: str, code: int) -> None:
    with lab.nothing_left():
        answer = lab.cni("ADD", "wish", lab.namespace(), config={"args": {"cni": {"ips": [ip]}}})
        assert answer.code == code, answer.document
        assert ip in answer.text


def test_mtu_and_mac_are_as_asked(lab: Lab) -> None:
    config = {"mtu": 1400, "runtimeConfig": {"mac": "02:11:22:33:44:55"}}
    pod = Pod(lab, "wishes", config=config)
    inside = json.loads(pod.ip("-j", "link", "show", "dev", "eth0"))[0]
    assert (inside["mtu"], inside["address"]) == (1400, "02:11:22:33:44:55")
    assert pod.check().status == 0


def test_bandwidth_is_shaped_in_both_directions(lab: Lab) -> None:
    limits = {
        "ingressRate": 50_000_000,
        "ingressBurst": 800_000,
        "egressRate": 20_000_000,
        "egressBurst": 800_000,
    }
    pod = Pod(lab, "slow", config={"runtimeConfig": {"bandwidth": limits}})
    outside = run("tc", "-n", lab.node().namespace, "qdisc", "show", "dev", pod.device)
    inside = run("tc", "-n", pod.namespace, "qdisc", "show", "dev", "eth0")
    assert re.search(r"tbf .*rate 50Mbit", outside)
    assert re.search(r"tbf .*rate 20Mbit", inside)
    assert pod.endpoint["bandwidth"] == {
        "toPodBitsPerS": 50_000_000,
        "fromPodBitsPerS": 20_000_000,
    }
    assert pod.check().status == 0

    def is_missed() -> bool:
        """The agent may repair it before it is asked."""
        run(
            "tc", "-n", lab.node().namespace, "qdisc", "del", "dev", pod.device, "root", check=False
        )
        return pod.check().code == 104

    wait_for(is_missed, "a CHECK that misses the limit")


# What an ADD refuses, leaving nothing


def _raw(lab: Lab, data: bytes, **more: Any) -> Answer:
    return finish(lab.start_cni("ADD", "raw", lab.namespace(), config=data, **more))


def _base(lab: Lab, **more: Any) -> bytes:
    document = {
        "cniVersion": "1.1.0",
        "name": "podwire",
        "type": "podwire-cni",
        "socket": str(lab.node().directory / "cni.sock"),
    }
    return json.dumps(document | more).encode()


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        pytest.param(lambda raw: raw[:-1], {6}, id="cut short"),
        pytest.param(lambda raw: raw + b"}", {6}, id="a brace too many"),
        pytest.param(lambda raw: raw.replace(b'"podwire"', b"7"), {6, 7}, id="name is a number"),
        pytest.param(lambda raw: raw.replace(b"1.1.0", b"9.9.9"), {1}, id="unknown version"),
        pytest.param(lambda raw: raw.replace(b'"podwire"', b'"../../etc"'), {7}, id="path as name"),
        pytest.param(lambda raw: raw.replace(b'"podwire"', rb'"a\u0000b"'), {7}, id="NUL in name"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_code(
    lab: Lab, change: Callable[[bytes], bytes], codes: set[int]
) -> None:
    with lab.nothing_left():
        answer = _raw(lab, change(_base(lab)))
        assert answer.code in codes, answer.document
        assert answer.document["msg"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        pytest.param({"mtu": 100_000}, 7, id="MTU too large"),
        pytest.param({"mtu": 67}, 7, id="MTU too small"),
        pytest.param({"mtu": "big"}, 6, id="MTU is text"),
        pytest.param({"runtimeConfig": {"mac": "zz"}}, 7, id="no MAC"),
        pytest.param({"runtimeConfig": {"mac": "01:00:5e:00:00:01"}}, 7, id="multicast MAC"),
        pytest.param(
            {"args": {"cni": {"labels": [{"key": "a/b/c", "value": "x"}]}}},
            7,
            id="label with two slashes",
        ),
        pytest.param(
            {"args": {"cni": {"labels": [{"key": "a", "value": "x;y"}]}}},
            7,
            id="label with a separator",
        ),
        pytest.param(
            {
                "args": {
                    "cni": {
                        "labels": [{"key": f"k{number}", "value": "v"} for number in range(10_000)]
                    }
                }
            },
            7,
            id="10,000 labels",
        ),
        pytest.param(
            {
                "runtimeConfig": {
                    "portMappings": [{"hostPort": 80, "containerPort": 80, "hostIP": "::1"}]
                }
            },
            7,
            id="port mappings",
        ),
    ],
)
def test_a_wish_that_cannot_be_is_refused(lab: Lab, config: dict[str, Any], code: int) -> None:
    with lab.nothing_left():
        answer = lab.cni("ADD", "wish", lab.namespace(), config=config)
        assert answer.code == code, answer.document
        assert len(json.dumps(answer.document)) < 16_384


def test_an_oversized_request_is_refused(lab: Lab) -> None:
    with lab.nothing_left():
        answer = _raw(lab, _base(lab, padding="x" * 3_000_000))
        assert answer.status == 1
        assert answer.code in (6, 7), answer.document


@pytest.mark.parametrize(
    ("container", "if_name", "code"),
    [
        pytest.param("ok", "averylonginterface", 7, id="interface name too long"),
        pytest.param("ok", "a/b", 7, id="slash in the interface's name"),
        pytest.param("ok", "..", 7, id="dots as the interface's name"),
        pytest.param("ok", "", 4, id="no interface name"),
        pytest.param("../../etc/passwd", "eth0", 4, id="path as container id"),
        pytest.param("", "eth0", 4, id="no container id"),
        pytest.param("a b", "eth0", 4, id="space in the container id"),
        pytest.param("x" * 5000, "eth0", 4, id="endless container id"),
    ],
)
def test_a_hostile_environment_is_refused(
    lab: Lab, container: str, if_name: str, code: int
) -> None:
    with lab.nothing_left():
        answer = lab.cni("ADD", container, lab.namespace(), if_name=if_name)
        assert answer.code in {code, 4, 7}, answer.document
        assert answer.status == 1


@pytest.mark.parametrize("args", ["NoEquals", "Unknown=1", "IP=zz;IgnoreUnknown=1", "MAC=zz"])
def test_bad_cni_args_are_refused(lab: Lab, args: str) -> None:
    with lab.nothing_left():
        assert lab.cni("ADD", "args", lab.namespace(), args=args).code in (4, 7)


def test_an_interface_name_that_exists_is_refused(lab: Lab) -> None:
    namespace = lab.namespace()
    run("ip", "-n", namespace, "link", "add", "eth0", "type", "bridge")
    with lab.nothing_left():
        answer = lab.cni("ADD", "taken", namespace)
        assert answer.code == 7, answer.document
        assert "eth0" in answer.text
    assert "bridge" in run("ip", "-n", namespace, "-d", "link", "show", "eth0")


def test_a_foreign_device_with_our_name_is_left_alone(lab: Lab) -> None:
    pod = Pod(lab, "foreign")
    name = pod.device
    assert pod.call("DEL").status == 0
    lab.settled()
    wait_for(lambda: not lab.devices(), "the device to be gone")
    node = lab.node().namespace
    run("ip", "-n", node, "link", "add", name, "type", "bridge")
    try:
        with lab.nothing_left(foreign_devices=1):
            answer = lab.cni("ADD", "foreign", lab.namespace())
            assert answer.code == 110, answer.document
            assert name in answer.text
        assert "bridge" in run("ip", "-n", node, "-d", "link", "show", name)
    finally:
        run("ip", "-n", node, "link", "del", name)


def test_a_namespace_that_vanished_is_named(lab: Lab) -> None:
    with lab.nothing_left():
        answer = lab.cni("ADD", "vanished", "pw.no-such-namespace")
        assert answer.code == 4
        assert "pw.no-such-namespace" in answer.text


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/proc/self/ns/mnt", id="another kind of namespace"),
        pytest.param("/etc/hostname", id="a file"),
        pytest.param("/etc", id="a directory"),
        pytest.param("/" + "x" * 5000, id="an endless path"),
        pytest.param("/dev/null", id="a device"),
    ],
)
def test_a_path_that_is_no_network_namespace_is_refused(lab: Lab, path: str) -> None:
    with lab.nothing_left():
        # The rig puts a directory before the name.
        answer = lab.cni("ADD", "no-netns", f"../..{path}")
        assert answer.code == 4, answer.document


@pytest.mark.parametrize("command", ["", "add", "ADDS", "../ADD"])
def test_a_command_that_is_none_is_refused(lab: Lab, command: str) -> None:
    answer = lab.cni(command, "x", lab.namespace())
    if command:
        assert answer.code == 4, answer.document
    else:
        assert answer == Answer(0, {})  # started by hand: it says what it is, on stderr


@pytest.mark.parametrize(
    "args",
    [
        "K8S_POD_NAME=../../etc/passwd;K8S_POD_NAMESPACE=default",
        "K8S_POD_NAME=a;K8S_POD_NAMESPACE=../b",
        "K8S_POD_NAME=a%00b;K8S_POD_NAMESPACE=default",
        "K8S_POD_NAME=" + "x" * 10_000 + ";K8S_POD_NAMESPACE=default",
        "K8S_POD_NAME=a\nb;K8S_POD_NAMESPACE=default",
    ],
)
def test_hostile_pod_names_are_refused(lab: Lab, args: str) -> None:
    with lab.nothing_left():
        answer = lab.cni("ADD", "hostile", lab.namespace(), args=f"{args};IgnoreUnknown=1")
        assert answer.code in (4, 7), answer.document


def test_the_nodes_own_namespace_is_refused(lab: Lab) -> None:
    with lab.nothing_left():
        assert lab.cni("ADD", "host", lab.node().namespace).code == 4


# Many at once


def test_many_at_once_get_addresses_of_their_own(lab: Lab) -> None:
    with lab.nothing_left():
        namespaces = {f"many{number}": lab.namespace() for number in range(24)}
        adding = [lab.start_cni("ADD", one, netns) for one, netns in namespaces.items()]
        answers = [finish(process) for process in adding]
        assert [answer.status for answer in answers] == [0] * len(answers)
        addresses = [address for answer in answers for address in answer.addresses]
        assert len(set(addresses)) == 2 * len(namespaces)
        # The next round begins while the last one is still on its way out.
        deleting = [lab.start_cni("DEL", one, netns) for one, netns in namespaces.items()]
        assert [finish(process).status for process in deleting] == [0] * len(namespaces)
        again = [lab.start_cni("ADD", one, netns) for one, netns in namespaces.items()]
        answers = [finish(process) for process in again]
        assert [answer.status for answer in answers] == [0] * len(answers), answers
        for namespace in namespaces:
            assert lab.cni("DEL", namespace, "").status == 0


# The caller goes away


def test_an_add_whose_launcher_is_killed_leaves_nothing(lab: Lab) -> None:
    with lab.nothing_left():
        for number in range(10):
            process = lab.start_cni("ADD", f"killed{number}", lab.namespace())
            if number % 2:
                wait_for(partial(_began, lab), "the ADD to begin")
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
            # A runtime calls DEL for what it gave up; an ADD that was through is ended by it.
            assert lab.cni("DEL", f"killed{number}", "").status == 0


def _began(lab: Lab) -> bool:
    return bool(lab.list_endpoints())


# The agent is away


def test_dels_are_spooled_while_the_agent_is_away_and_done_at_its_start(small_lab: Lab) -> None:
    lab = small_lab
    with lab.nothing_left():
        pods = [Pod(lab, f"spooled{number}") for number in range(3)]
        kept = Pod(lab, "kept")
        assert lab.cli("lab", "node", "kill", "node1").code == 0
        short = {"agent-wait": 0}
        for pod in pods:
            run("ip", "netns", "del", pod.namespace)
            assert pod.call("DEL", config=short).status == 0
        spool = lab.node().directory / "spool"
        assert len(list(spool.glob("*.del"))) == 3
        assert lab.cni("ADD", "early", lab.namespace(), config=short).code == 11
        assert lab.cni("STATUS", config=short).code == 50
        assert lab.cli("lab", "node", "start", "node1").code == 0
        wait_for(lambda: list(lab.endpoints()) == ["kept"], "the spool to be replayed")
        wait_for(lambda: not list(spool.glob("*.del")), "the spool to be empty")
        assert kept.check().status == 0
        assert kept.call("DEL").status == 0


# One family only


@pytest.mark.parametrize(
    ("fixture", "own", "other"),
    [
        pytest.param("small_lab", 4, "fd10:244:0:1::9", id="IPv4"),
        pytest.param("ipv6_lab", 6, "10.244.1.9", id="IPv6"),
    ],
)
def test_a_node_of_one_family_gives_one_address(
    request: pytest.FixtureRequest, fixture: str, own: int, other: str
) -> None:
    lab: Lab = request.getfixturevalue(fixture)
    with lab.nothing_left():
        pod = Pod(lab, "single")
        [address] = pod.result.addresses
        assert ipaddress.ip_address(address).version == own
        assert pod.endpoint["addresses"] == [address] == [pod.endpoint[f"ipv{own}"]]
        assert len(pod.result.document["routes"]) == 1
        assert pod.check().status == 0
        config = {"args": {"cni": {"ips": [other]}}}
        assert lab.cni("ADD", "other", lab.namespace(), config=config).code == 101
        assert pod.call("DEL").status == 0


def test_exhaustion_is_said_by_add_status_and_metrics(small_lab: Lab) -> None:
    lab = small_lab
    pods: list[Pod] = []
    with lab.nothing_left():
        while lab.get("/ipam")["ranges"][0]["free"]:
            pods.append(Pod(lab, f"one{len(pods)}"))
        assert len({pod.ipv4 for pod in pods}) == len(pods) == 7  # all but the node's own
        with lab.nothing_left():
            answer = lab.cni("ADD", "last", lab.namespace())
        assert (answer.code, "10.244.1.0/29" in answer.text) == (100, True), answer.document
        assert lab.cni("STATUS").code == 50
        assert "7 of 7 used" in lab.cli("status").out
        assert re.search(r'cidr="10.244.1.0/29",state="free"\} 0\.0$', lab.metrics(), re.MULTILINE)
        freed = pods.pop(0)
        assert freed.call("DEL").status == 0
        wait_for(lambda: lab.cni("STATUS").status == 0, "an address to be free")
        pods.append(Pod(lab, "next"))
        assert pods[-1].ipv4 == freed.ipv4
        for pod in pods:
            assert pod.call("DEL").status == 0

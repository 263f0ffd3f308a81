"""Decoding of CNI calls: what real runtimes send, what is refused, with which code and which words."""

import json
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.cni import netconf
from podwire.cni.errors import code_of
from podwire.cni.faults import KEPT_OF_EACH_KIND
from podwire.cni.netconf import decode_request
from podwire.model.endpoint import AttachmentKey, Bandwidth, HostPort
from podwire.model.errors import InvalidRequest, UnsupportedField
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.request import AttachRequest, NamedPort
from podwire.model.wire import SUPPORTED_CNI_VERSIONS

CONTAINER = "9f3c2a"
ENV = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": CONTAINER,
    "CNI_NETNS": "/var/run/netns/cni-1",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/opt/cni/bin",
}
CONFIG = {"cniVersion": "1.1.0", "name": "podwire", "type": "podwire-cni"}

Object = dict[str, Any]


def decode(config: Object | bytes | None = None, **env: str) -> AttachRequest:
    """Decode CONFIG (or all of `config`) with ENV changed by `env`, whose keys lack the CNI_ prefix."""
    stdin = config if isinstance(config, bytes) else json.dumps({**CONFIG, **(config or {})})
    changed = {**ENV, **{f"CNI_{name}": value for name, value in env.items()}}
    return decode_request(changed, stdin if isinstance(stdin, bytes) else stdin.encode(), 42)


def refuse(config: Object | bytes | None = None, **env: str) -> InvalidRequest:
    """Give the error that the call is refused with."""
    with pytest.raises(InvalidRequest) as caught:
        decode(config, **env)
    assert caught.value.hint
    return caught.value


def test_a_plain_add_names_its_attachment_and_nothing_more() -> None:
    request = decode()
    assert request.key == AttachmentKey(
        NetworkName("podwire"), ContainerId(CONTAINER), InterfaceName("eth0")
    )
    assert (request.pod, request.namespace, request.started_boottime_ns) == (
        CONTAINER,
        "default",
        42,
    )
    assert (request.wanted_ips, request.wanted_mac, request.mtu) == ((), "", 0)
    assert request.unknown_keys == ()


# What real runtimes were seen to send. Keys of runtimeConfig come in Go's own case from containerd.
CONTAINERD_ARGS = (
    "K8S_POD_UID=1c5e-77;IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;"
    f"K8S_POD_INFRA_CONTAINER_ID={CONTAINER};K8S_POD_NAME=web-0"
)
CRIO_ARGS = (
    f"IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;"
    f"K8S_POD_INFRA_CONTAINER_ID={CONTAINER};K8S_POD_UID=1c5e-77"
)
PODMAN_ARGS = "IgnoreUnknown=1;K8S_POD_NAME=db_1"

RUNTIMES: list[tuple[str, Object, str, Object]] = [
    (
        "containerd",
        {
            "capabilities": {"bandwidth": True},
            "runtimeConfig": {"bandwidth": {"IngressRate": 8000, "EgressRate": 16000}},
        },
        CONTAINERD_ARGS,
        {
            "namespace": "shop",
            "pod": "web-0",
            "pod_uid": "1c5e-77",
            "is_plain": False,
            "bandwidth": Bandwidth(to_pod_bits_per_s=8000, from_pod_bits_per_s=16000),
        },
    ),
    (
        "cri-o",
        {"runtimeConfig": {"cgroupPath": "/pod1", "io.kubernetes.cri-o.pod-annotations": {}}},
        CRIO_ARGS,
        {"namespace": "shop", "pod": "web-0", "pod_uid": "1c5e-77", "is_plain": False},
    ),
    (
        "podman",
        {"runtimeConfig": {"aliases": {"podwire": ["9f3c2a"]}, "ips": ["10.88.0.9"]}},
        f"{PODMAN_ARGS};IP=10.88.0.9;MAC=0A-58-0a-58-00-09",
        {
            "pod": "db_1",
            "is_plain": True,
            "namespace": "default",
            "wanted_ips": (IPv4Address("10.88.0.9"),),
            "wanted_mac": "0a:58:0a:58:00:09",
        },
    ),
    (
        "the contract's example",
        {
            "socket": "/run/podwire/cni.sock",
            "agent-wait": 30,
            "ipam": {},
            "mtu": 1400,
            "chaining-mode": "",
            "log-level": "info",
            "args": {
                "cni": {
                    "labels": [{"key": "app", "value": "web"}],
                    "ips": ["10.244.1.7"],
                    "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
                    "pools": ["fast", "slow", "fast"],
                }
            },
            "runtimeConfig": {"ips": [], "mac": "", "portMappings": [], "bandwidth": {}},
        },
        "",
        {
            "mtu": 1400,
            "log_level": "info",
            "wanted_ips": (IPv4Address("10.244.1.7"),),
            "ports": (NamedPort("http", 8080, "TCP"),),
            "pools": ("fast", "slow"),
            "unknown_keys": (),
        },
    ),
    (
        "nulls, as Go writes empty values",
        {"args": None, "runtimeConfig": None, "ipam": None, "prevResult": None, "mtu": None},
        "",
        {"mtu": 0, "wanted_ips": ()},
    ),
    (
        "two families with prefix lengths",
        {"runtimeConfig": {"IPs": ["fd00::5/64", "10.1.2.3/24"]}},
        "IgnoreUnknown=TRUE;FOO=bar;",
        {"wanted_ips": (IPv4Address("10.1.2.3"), IPv6Address("fd00::5"))},
    ),
    (
        "unknown keys are accepted and listed",
        {"ipMasq": True, "zeta": 1, "cniVersions": ["1.0.0"]},
        "",
        {"unknown_keys": ("ipMasq", "zeta")},
    ),
]


@pytest.mark.parametrize(
    ("config", "args", "expected"), [row[1:] for row in RUNTIMES], ids=[row[0] for row in RUNTIMES]
)
def test_an_add_of_a_runtime_is_understood(config: Object, args: str, expected: Object) -> None:
    request = decode(config, ARGS=args)
    assert {name: getattr(request, name) for name in expected} == expected


def test_a_configuration_is_read_once_and_serves_each_pod_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Object = {
        "name": "read-once",
        "args": {"cni": {"labels": [{"key": "a", "value": "b"}]}},
    }
    first = decode(config, ARGS="K8S_POD_NAME=one;IP=10.0.0.9", CONTAINERID="c1")
    monkeypatch.delattr(netconf, "_read_json")
    second = decode(config, ARGS="K8S_POD_NAME=two", CONTAINERID="c2")
    assert (first.pod, second.pod) == ("one", "two")
    assert (len(first.wanted_ips), second.wanted_ips) == (1, ())
    assert first.key != second.key
    assert "cni:a=b" in second.labels
    assert not any("one" in label for label in second.labels)


def test_faults_are_not_remembered() -> None:
    config: Object = {"name": "faulty", "mtu": -1}
    [message] = {refuse(config, CONTAINERID="!").message for _ in range(2)}
    assert "mtu" in message
    assert "CNI_CONTAINERID" in refuse(CONTAINERID="!").message


def test_labels_are_canonical_and_carry_network_and_namespace() -> None:
    given_labels = [{"key": "b"}, {"key": "a.io/x", "value": "1"}, {"key": "a.io/x", "value": "1"}]
    request = decode({"args": {"cni": {"labels": given_labels}}}, ARGS="K8S_POD_NAME=web")
    assert request.labels == (
        "cni:a.io/x=1",
        "cni:b=",
        "cni:podwire.io/name=web",
        "cni:podwire.io/network=podwire",
        "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=default",
        "k8s:io.kubernetes.pod.namespace=default",
    )


@pytest.mark.parametrize("version", SUPPORTED_CNI_VERSIONS)
def test_every_version_is_accepted_for_add_and_del(version: str) -> None:
    for command in ("ADD", "DEL"):
        assert decode({"cniVersion": version}, COMMAND=command).cni_version == version


EMPTY_ENV = {"CONTAINERID": "", "NETNS": "", "IFNAME": "", "ARGS": ""}
DUMMY_ENV = {name: "dummy" for name in EMPTY_ENV}


@pytest.mark.parametrize("env", [EMPTY_ENV, DUMMY_ENV], ids=["empty", "dummy"])
@pytest.mark.parametrize("command", ["STATUS", "GC"])
def test_status_and_gc_do_not_look_at_the_attachment(command: str, env: dict[str, str]) -> None:
    request = decode({}, COMMAND=command, **env)
    assert (request.key, request.netns_path) == (None, "")


# (id, mapping as a runtime sends it, what is asked for)
HOST_PORTS: list[tuple[str, Object, tuple[HostPort, ...]]] = [
    (
        "containerd",
        {"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""},
        (HostPort("TCP", 8080, 80),),
    ),
    ("no protocol", {"hostPort": 1, "containerPort": 65_535}, (HostPort("TCP", 1, 65_535),)),
    (
        "UDP",
        {"hostPort": 53, "containerPort": 5353, "protocol": "Udp"},
        (HostPort("UDP", 53, 5353),),
    ),
    ("SCTP", {"hostPort": 9, "containerPort": 9, "protocol": "SCTP"}, (HostPort("SCTP", 9, 9),)),
    (
        "an address of the host",
        {"hostPort": 80, "containerPort": 80, "hostIP": "2001:DB8:0::1"},
        (HostPort("TCP", 80, 80, "2001:db8::1"),),
    ),
    (
        "IPv4 in the form of IPv6",
        {"hostPort": 80, "containerPort": 80, "hostIP": "::ffff:192.0.2.1"},
        (HostPort("TCP", 80, 80, "192.0.2.1"),),
    ),
    (
        "loopback",
        {"hostPort": 80, "containerPort": 80, "hostIP": "127.0.0.1"},
        (HostPort("TCP", 80, 80, "127.0.0.1"),),
    ),
    ("a port that is only named", {"hostPort": 0, "containerPort": 80, "protocol": "x"}, ()),
    ("nothing", {}, ()),
]


@pytest.mark.parametrize(
    ("mapping", "wanted"), [row[1:] for row in HOST_PORTS], ids=[row[0] for row in HOST_PORTS]
)
def test_host_ports_are_read_as_runtimes_send_them(
    mapping: Object, wanted: tuple[HostPort, ...]
) -> None:
    config = {"runtimeConfig": {"PortMappings": [mapping, mapping]}}
    assert decode(config).host_ports == wanted


# A DEL must get through with whatever ADD was refused for, with no namespace, and with what spools keep.
DELS: list[tuple[str, Object, dict[str, str]]] = [
    ("empty namespace", {}, {"NETNS": ""}),
    ("vanished namespace", {}, {"NETNS": "/run/netns/gone"}),
    ("prevResult of another plugin", {"prevResult": {"ips": "no list"}}, {}),
    ("unsupported fields", {"chaining-mode": "x", "ipam": {"type": "host-local"}}, {}),
    ("port mappings at fault", {"runtimeConfig": {"portMappings": [{"hostPort": 80}]}}, {}),
    ("wrong types", {"mtu": "big", "args": 5, "runtimeConfig": [], "type": None}, {}),
    ("unknown arguments", {}, {"ARGS": "FOO=bar;garbage"}),
    ("another container in the arguments", {}, {"ARGS": "K8S_POD_INFRA_CONTAINER_ID=other"}),
]


@pytest.mark.parametrize(("config", "env"), [row[1:] for row in DELS], ids=[r[0] for r in DELS])
def test_del_needs_nothing_but_its_key(config: Object, env: dict[str, str]) -> None:
    request = decode(config, COMMAND="DEL", **env)
    assert request.key is not None
    assert request.key.container_id == CONTAINER


def cni(**values: Any) -> Object:
    """Configuration with these keys in args.cni."""
    return {"args": {"cni": values}}


def capability(**values: Any) -> Object:
    """Configuration with these capability arguments."""
    return {"runtimeConfig": values}


def ports(**mapping: Any) -> Object:
    """Configuration that asks for one port of the host."""
    return capability(portMappings=[mapping])


LABEL_FLOOD = [{"key": f"k{number}", "value": "v"} for number in range(10_000)]
DEEP = b'{"cniVersion":"1.1.0","name":"n","type":"t","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"

# (id, code, words that the message must have, configuration, environment)
REFUSED: list[tuple[str, int, str, Object | bytes, dict[str, str]]] = [
    ("unknown version", 1, "9.9.9", {"cniVersion": "9.9.9"}, {}),
    ("version with a patch that is not ours", 1, "0.3.2", {"cniVersion": "0.3.2"}, {}),
    ("CHECK too early", 1, "0.4.0", {"cniVersion": "0.3.1"}, {"COMMAND": "CHECK"}),
    ("GC too early", 1, "1.1.0", {"cniVersion": "1.0.0"}, {"COMMAND": "GC"}),
    ("STATUS too early", 1, "1.1.0", {"cniVersion": "1.0.0"}, {"COMMAND": "STATUS"}),
    ("a host port beyond all", 7, "hostPort is 65536", ports(hostPort=65_536, containerPort=1), {}),
    ("a negative host port", 7, "hostPort is -1", ports(hostPort=-1, containerPort=1), {}),
    ("a host port in words", 6, "hostPort is '80'", ports(hostPort="80", containerPort=80), {}),
    ("no pod port", 7, "containerPort is missing", ports(hostPort=80), {}),
    ("pod port 0", 7, "containerPort is 0", ports(hostPort=80, containerPort=0), {}),
    ("Go's case", 7, "protocol is 'ICMP'", ports(HostPort=1, ContainerPort=1, Protocol="icmp"), {}),
    ("a host name", 7, "hostIP is 'here'", ports(hostPort=1, containerPort=1, hostIP="here"), {}),
    ("::1", 7, "use 127.0.0.1", ports(hostPort=1, containerPort=1, hostIP="0:0::1"), {}),
    ("link-local", 7, "not forwarded", ports(hostPort=1, containerPort=1, hostIP="fe80::2"), {}),
    ("a group", 7, "single host", ports(hostPort=1, containerPort=1, hostIP="224.0.0.1"), {}),
    ("mappings are an object", 6, "portMappings", capability(portMappings={}), {}),
    ("too many", 7, "at most 1024", capability(PortMappings=[{}] * 1025), {}),
    (
        "one port of the host, two of the pod",
        7,
        "portMappings[1] leads TCP port 80 to a second",
        capability(
            portMappings=[
                {"hostPort": 80, "containerPort": 80},
                {"hostPort": 80, "containerPort": 81, "protocol": "tcp"},
            ]
        ),
        {},
    ),
    ("address ranges", 2, "ipRanges", capability(ipRanges=[[{"subnet": "10.0.0.0/8"}]]), {}),
    ("delegated IPAM", 2, "host-local", {"ipam": {"type": "host-local"}}, {}),
    ("delegated IPAM, STATUS", 2, "dhcp", {"ipam": {"type": "dhcp"}}, {"COMMAND": "STATUS"}),
    ("chaining mode", 2, "first plugin", {"chaining-mode": "generic-veth"}, {}),
    ("ADD after another plugin", 2, "first plugin", {"prevResult": {"ips": []}}, {}),
    ("pools that are no names", 6, "args.cni.pools[0]", cni(pools=[1]), {}),
    ("no command", 4, "CNI_COMMAND", {}, {"COMMAND": ""}),
    ("unknown command", 4, "'add'", {}, {"COMMAND": "add"}),
    ("no container id", 4, "CNI_CONTAINERID is missing", {}, {"CONTAINERID": ""}),
    ("container id with a path", 4, "CNI_CONTAINERID", {}, {"CONTAINERID": "../../etc"}),
    ("container id with NUL", 4, "\\x00", {}, {"CONTAINERID": "a\0b"}),
    ("container id with a line end", 4, "CNI_CONTAINERID", {}, {"CONTAINERID": "abc\n"}),
    ("container id of a novel", 4, "253", {}, {"CONTAINERID": "a" * 100_000}),
    ("no interface name", 4, "CNI_IFNAME is missing", {}, {"IFNAME": ""}),
    ("interface name too long", 4, "15 bytes", {}, {"IFNAME": "eth0123456789abc"}),
    ("interface name too long in bytes", 4, "15 bytes", {}, {"IFNAME": "ü" * 8}),
    ("interface name with a path", 4, "CNI_IFNAME", {}, {"IFNAME": "../eth0"}),
    ("interface name with a blank", 4, "CNI_IFNAME", {}, {"IFNAME": "eth 0"}),
    ("interface name with NUL", 4, "CNI_IFNAME", {}, {"IFNAME": "eth\0"}),
    ("the loopback", 4, "every namespace", {}, {"IFNAME": "lo"}),
    ("a directory of settings", 4, "every namespace", {}, {"IFNAME": "all"}),
    ("the other directory of settings", 4, "every namespace", {}, {"IFNAME": "default"}),
    ("loopback", 4, "'lo'", {}, {"IFNAME": "lo"}),
    ("no namespace on ADD", 4, "CNI_NETNS is missing; ADD", {}, {"NETNS": ""}),
    ("no namespace on CHECK", 4, "CHECK", {"prevResult": {}}, {"NETNS": "", "COMMAND": "CHECK"}),
    ("namespace path with NUL", 4, "CNI_NETNS", {}, {"NETNS": "/run/\0"}),
    ("namespace path too long", 4, "CNI_NETNS", {}, {"NETNS": "/" + "a" * 5000}),
    ("unknown argument", 4, "'FOO'", {}, {"ARGS": "FOO=bar"}),
    ("unknown argument, IgnoreUnknown=0", 4, "'FOO'", {}, {"ARGS": "IgnoreUnknown=0;FOO=bar"}),
    ("IgnoreUnknown nonsense", 4, "IgnoreUnknown", {}, {"ARGS": "IgnoreUnknown=maybe"}),
    ("argument without value", 4, "KEY=VALUE", {}, {"ARGS": "IgnoreUnknown=1;K8S_POD_NAME"}),
    ("argument twice", 4, "two different", {}, {"ARGS": "IP=10.0.0.1;IP=10.0.0.2"}),
    ("pod name with a path", 4, "K8S_POD_NAME", {}, {"ARGS": "K8S_POD_NAME=../x"}),
    ("pod name with NUL", 4, "K8S_POD_NAME", {}, {"ARGS": "K8S_POD_NAME=a\0"}),
    ("pod name too long", 4, "K8S_POD_NAME", {}, {"ARGS": f"K8S_POD_NAME={'a' * 254}"}),
    ("namespace with a path", 4, "K8S_POD_NAMESPACE", {}, {"ARGS": "K8S_POD_NAMESPACE=a/b"}),
    ("uid with a label separator", 4, "K8S_POD_UID", {}, {"ARGS": "K8S_POD_UID=a:b"}),
    ("another container", 4, "'other'", {}, {"ARGS": "K8S_POD_INFRA_CONTAINER_ID=other"}),
    ("IP is not an address", 4, "CNI_ARGS IP", {}, {"ARGS": "IP=ten"}),
    ("IP against ips", 4, "10.0.0.9", cni(ips=["10.0.0.1"]), {"ARGS": "IP=10.0.0.9"}),
    ("MAC is multicast", 4, "CNI_ARGS MAC", {}, {"ARGS": "MAC=01:00:5e:00:00:01"}),
    (
        "MAC against mac",
        4,
        "CNI_ARGS MAC",
        capability(mac="0a:00:00:00:00:01"),
        {"ARGS": "MAC=0a:00:00:00:00:02"},
    ),
    ("nothing on stdin", 6, "stdin is not JSON", b"", {}),
    ("half an object", 6, "not JSON", b'{"cniVersion":"1.1.0","name"', {}),
    ("two objects", 6, "not JSON", b"{}{}", {}),
    ("no object", 6, "a list of 0, not a JSON object", b"[]", {}),
    ("null", 6, "null, not a JSON object", b"null", {}),
    ("not UTF-8", 6, "not JSON", b'{"name":"\xff"}', {}),
    ("UTF-16", 6, "not JSON", '{"name":"x"}'.encode("utf-16"), {}),
    ("byte order mark", 6, "BOM", b"\xef\xbb\xbf{}", {}),
    ("not a number", 6, "NaN", b'{"mtu":NaN}', {}),
    ("a number of 5000 digits", 6, "not JSON", b'{"mtu":' + b"1" * 5000 + b"}", {}),
    ("half a surrogate pair", 6, "surrogate", b'{"name":"\\ud800"}', {}),
    ("a key twice", 6, "'mtu' comes twice", b'{"mtu":1400,"mtu":1500}', {}),
    ("a key twice, deep inside", 6, "twice", b'{"args":{"cni":{"ips":[],"ips":[]}}}', {}),
    ("nested too deeply", 6, "too deeply", DEEP, {}),
    ("version is a number", 6, "cniVersion is 1.1", {"cniVersion": 1.1}, {}),
    ("name is a list", 6, "name is a list of 1", {"name": ["x"]}, {}),
    ("mtu is text", 6, "mtu is '1500'", {"mtu": "1500"}, {}),
    ("mtu is a float", 6, "mtu is 1500.5", {"mtu": 1500.5}, {}),
    ("mtu is a truth", 6, "mtu is true", {"mtu": True}, {}),
    ("ips is text", 6, "args.cni.ips is '10.0.0.1'", cni(ips="10.0.0.1"), {}),
    ("an address is a number", 6, "args.cni.ips[0] is 5", cni(ips=[5]), {}),
    ("args is a list", 6, "args is a list", {"args": [1]}, {}),
    ("runtimeConfig is text", 6, "runtimeConfig", {"runtimeConfig": "x"}, {}),
    ("labels is an object", 6, "labels is an object", cni(labels={"app": "web"}), {}),
    (
        "a label value is a number",
        6,
        "labels[0].value is 1",
        cni(labels=[{"key": "a", "value": 1}]),
        {},
    ),
    ("ipam is a number", 6, "ipam is 5", {"ipam": 5}, {}),
    ("a rate is text", 6, "ingressRate", capability(bandwidth={"ingressRate": "1M"}), {}),
    ("prevResult of CHECK is text", 6, "prevResult", {"prevResult": "x"}, {"COMMAND": "CHECK"}),
    (
        "prevResult has a wrong type inside",
        6,
        "prevResult",
        {"prevResult": {"ips": [{"address": 5}]}},
        {"COMMAND": "CHECK"},
    ),
    (
        "GC list is text",
        6,
        "valid-attachments",
        {"cni.dev/valid-attachments": "x"},
        {"COMMAND": "GC"},
    ),
    ("no version", 7, "cniVersion is missing", b'{"name":"n","type":"t"}', {}),
    ("empty object", 7, "name is missing", b"{}", {}),
    ("no name", 7, "name is missing", {"name": ""}, {}),
    ("name with a path", 7, "name is '../x'", {"name": "../x"}, {}),
    ("name with NUL", 7, "name", {"name": "a\0b"}, {}),
    ("name too long", 7, "253", {"name": "a" * 254}, {}),
    ("no type", 7, "type is missing", {"type": ""}, {}),
    ("type is a path", 7, "not a path", {"type": "/opt/cni/bin/podwire-cni"}, {}),
    ("mtu too small", 7, "mtu is 100", {"mtu": 100}, {}),
    ("mtu too large", 7, "mtu is 70000", {"mtu": 70_000}, {}),
    ("mtu negative", 7, "mtu is -1", {"mtu": -1}, {}),
    ("log level", 7, "'loud'", {"log-level": "loud"}, {}),
    ("no address", 7, "args.cni.ips[0]", cni(ips=["10.0.0.256"]), {}),
    ("empty address", 7, "args.cni.ips[0]", cni(ips=[""]), {}),
    ("address is null", 7, "args.cni.ips[0]", cni(ips=[None]), {}),
    ("address with a scope", 7, "scope", cni(ips=["fe80::1%eth0"]), {}),
    ("two IPv4 addresses", 7, "one IPv4 address", cni(ips=["10.0.0.1", "10.0.0.2"]), {}),
    (
        "ips against ips",
        7,
        "runtimeConfig.ips[0]",
        {**cni(ips=["10.0.0.1"]), **capability(ips=["10.0.0.2"])},
        {},
    ),
    ("a thousand addresses", 7, "1000 elements", cni(ips=["10.0.0.1"] * 1000), {}),
    ("no MAC", 7, "not a MAC", capability(mac="0a:00"), {}),
    ("MAC with mixed separators", 7, "not a MAC", capability(mac="0a:00-00:00-00:01"), {}),
    ("MAC of all devices", 7, "a single device", capability(mac="ff:ff:ff:ff:ff:ff"), {}),
    ("MAC of none", 7, "a single device", capability(mac="00:00:00:00:00:00"), {}),
    ("10,000 labels", 7, "10000 elements", cni(labels=LABEL_FLOOD), {}),
    ("label key with a path", 7, "labels[0].key", cni(labels=[{"key": "../a"}]), {}),
    ("label key with NUL", 7, "labels[0].key", cni(labels=[{"key": "a\0"}]), {}),
    ("label key with a source", 7, "labels[0].key", cni(labels=[{"key": "reserved:host"}]), {}),
    ("label key of podwire", 7, "reserved", cni(labels=[{"key": "podwire.io/name"}]), {}),
    (
        "label key of a namespace",
        7,
        "the pod's namespace",
        cni(labels=[{"key": "io.kubernetes.pod.namespace", "value": "kube-system"}]),
        {},
    ),
    ("label without key", 7, "labels[0].key", cni(labels=[{"value": "x"}]), {}),
    ("label value with a separator", 7, "value", cni(labels=[{"key": "a", "value": "b;c"}]), {}),
    ("label value too long", 7, "value", cni(labels=[{"key": "a", "value": "b" * 64}]), {}),
    (
        "two values of a label",
        7,
        "second value",
        cni(labels=[{"key": "a", "value": "1"}, {"key": "a", "value": "2"}]),
        {},
    ),
    ("port without number", 7, "port is missing", cni(ports=[{"name": "http"}]), {}),
    ("port 0", 7, "port is 0", cni(ports=[{"name": "http", "port": 0}]), {}),
    ("port 65536", 7, "port is 65536", cni(ports=[{"name": "http", "port": 65_536}]), {}),
    ("port name of digits", 7, "'80'", cni(ports=[{"name": "80", "port": 80}]), {}),
    ("protocol", 7, "'ICMP'", cni(ports=[{"name": "a", "port": 1, "protocol": "icmp"}]), {}),
    (
        "two numbers of a port",
        7,
        "second number",
        cni(ports=[{"name": "a", "port": 1}, {"name": "a", "port": 2}]),
        {},
    ),
    ("capability twice", 7, "different case", capability(ips=[], IPs=[]), {}),
    ("negative rate", 7, "ingressRate", capability(bandwidth={"ingressRate": -1}), {}),
    ("burst without rate", 7, "egressRate", capability(bandwidth={"egressBurst": 9}), {}),
    ("rate of seven bits", 7, "ingressRate is 7", capability(bandwidth={"ingressRate": 7}), {}),
    ("CHECK without prevResult", 7, "prevResult is missing", {}, {"COMMAND": "CHECK"}),
    (
        "prevResult points nowhere",
        7,
        "interface 3 of 0",
        {"prevResult": {"ips": [{"address": "10.0.0.1/32", "interface": 3}]}},
        {"COMMAND": "CHECK"},
    ),
    (
        "GC entry without ifname",
        7,
        "ifname",
        {"cni.dev/valid-attachments": [{"containerID": "a"}]},
        {"COMMAND": "GC"},
    ),
    (
        "GC entry with a path",
        7,
        "containerID",
        {"cni.dev/valid-attachments": [{"containerID": "../a", "ifname": "eth0"}]},
        {"COMMAND": "GC"},
    ),
    (
        "GC lists differ",
        7,
        "different attachments",
        {
            "cni.dev/valid-attachments": [],
            "cni.dev/attachments": [{"containerID": "a", "ifname": "eth0"}],
        },
        {"COMMAND": "GC"},
    ),
]


@pytest.mark.parametrize(
    ("code", "words", "config", "env"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_bad_input_is_refused_with_its_code_and_reason(
    code: int, words: str, config: Object | bytes, env: dict[str, str]
) -> None:
    error = refuse(config, **env)
    assert code_of(error) == code, error.message
    assert words in error.message
    assert "\0" not in error.message
    assert len(error.message) < 4096


def test_all_faults_come_in_one_error_lowest_code_first() -> None:
    error = refuse(
        {"cniVersion": "9.0.0", "mtu": "x", "log-level": "loud", "chaining-mode": "y"}, IFNAME=""
    )
    assert code_of(error) == 1
    assert [fault.path for fault in error.faults] == [
        "cniVersion",
        "chaining-mode",
        "CNI_IFNAME",
        "mtu",
        "log-level",
    ]


def test_environment_and_broken_json_are_reported_together() -> None:
    error = refuse(b"{", IFNAME="")
    assert code_of(error) == 4
    assert {fault.path for fault in error.faults} == {"CNI_IFNAME", "stdin"}


def test_an_input_made_of_faults_gives_a_short_error() -> None:
    flood = {"cni.dev/valid-attachments": [{"containerID": "/", "ifname": "/"}] * 20_000}
    error = refuse(flood, COMMAND="GC")
    assert len(error.faults) == KEPT_OF_EACH_KIND
    assert "and 39995 more" in error.message


LIVING = [{"containerID": "a", "ifname": "eth0"}, {"containerID": "b", "ifname": "net1"}]
GC_LISTS: list[tuple[str, Object, object]] = [
    ("no list at all", {}, None),
    ("null, as CRI-O says when nothing runs", {"cni.dev/valid-attachments": None}, ()),
    ("empty", {"cni.dev/valid-attachments": []}, ()),
    (
        "both keys",
        {"cni.dev/valid-attachments": LIVING, "cni.dev/attachments": LIVING[::-1]},
        (("a", "eth0"), ("b", "net1")),
    ),
    ("the older key alone", {"cni.dev/attachments": LIVING}, (("a", "eth0"), ("b", "net1"))),
    (
        "keys in another case",
        {"cni.dev/valid-attachments": [{"ContainerID": "a", "IfName": "eth0"}]},
        (("a", "eth0"),),
    ),
]


@pytest.mark.parametrize(
    ("config", "expected"), [row[1:] for row in GC_LISTS], ids=[row[0] for row in GC_LISTS]
)
def test_gc_tells_no_list_from_an_empty_one(config: Object, expected: object) -> None:
    assert decode(config, COMMAND="GC", **EMPTY_ENV).valid_attachments == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
KEYS = [
    *("cniVersion", "name", "type", "mtu", "ipam", "args", "runtimeConfig", "prevResult"),
    *("log-level", "chaining-mode", "cni.dev/valid-attachments", "cni.dev/attachments"),
]
CNI_KEYS = ["labels", "ips", "ports", "pools"]
RUNTIME_KEYS = ["ips", "mac", "bandwidth", "portMappings", "ipRanges"]


@st.composite
def calls(draw: Callable[..., Any]) -> tuple[dict[str, str], bytes]:
    """Calls whose every value may be anything."""
    config = {**CONFIG, **draw(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))}
    if draw(st.booleans()):
        config["args"] = {"cni": draw(st.dictionaries(st.sampled_from(CNI_KEYS), JSON))}
        config["runtimeConfig"] = draw(st.dictionaries(st.sampled_from(RUNTIME_KEYS), JSON))
    names = st.sampled_from([*ENV, "CNI_ARGS"])
    env = {**ENV, **draw(st.dictionaries(names, st.text(), max_size=3))}
    env["CNI_COMMAND"] = draw(st.sampled_from(["ADD", "DEL", "CHECK", "GC", "STATUS"]))
    return env, json.dumps(config).encode()


@given(calls())
def test_any_call_is_decoded_or_refused(call: tuple[dict[str, str], bytes]) -> None:
    env, stdin = call
    try:
        request = decode_request(env, stdin, 1)
    except InvalidRequest:
        return
    assert request.command == env["CNI_COMMAND"]
    assert all(label.isprintable() for label in request.labels)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(stdin: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_request(ENV, stdin, 1)


def test_what_is_not_built_names_key_and_value() -> None:
    error = refuse({"ipam": {"type": "host-local"}})
    assert isinstance(error, UnsupportedField)
    assert "ipam.type is 'host-local'" in error.message

"""Settings: every key from every source, faults all at once, values that this version refuses."""

import dataclasses
import ipaddress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.agent.config_reload import FOUND, LiveConfig
from podwire.model.config import SETTINGS
from podwire.model.config.help import help_text, markdown
from podwire.model.config.settings import show
from podwire.model.config.sources import Settled, parse_arguments, settle
from podwire.model.errors import InvalidConfiguration

ROOT = Path(__file__).resolve().parents[2]
CIDRS = 'node_cidrs = ["10.244.1.0/24"]\n'


def read(text: str = CIDRS, *, flags: str = "", **environment: str) -> Settled:
    return settle(
        host_name="host-1",
        arguments=parse_arguments(flags.split()),
        environment=environment,
        text=text,
        file_name="agent.toml",
    )


def refused(text: str = CIDRS, *, flags: str = "", **environment: str) -> InvalidConfiguration:
    with pytest.raises(InvalidConfiguration) as caught:
        read(text, flags=flags, **environment)
    return caught.value


def test_defaults_are_those_of_the_contract() -> None:
    config = read().config
    assert config.node.node_name == "host-1"
    assert config.files.cni_socket == Path("/run/podwire/cni.sock")
    assert config.files.api_socket == Path("/run/podwire/api.sock")
    assert config.store.store == "sqlite:///var/lib/podwire/store.db"
    assert config.report.flow_ring == 4096
    assert config.policy.identity_wait_s == 10
    reloadable = {"log_level", "masquerade", "policy_enforcement", "policy_entries"}
    assert reloadable == {key for key, row in SETTINGS.items() if row.reloadable}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('store = "kubernetes"', (120, False)),
        ('store = "kubernetes"\nstatus_grace_s = 0\nstatus_on_exhaustion = true', (0, True)),
        ('store = "sqlite:///tmp/store.db"', (0, True)),
        ("", (0, True)),
    ],
)
def test_in_kubernetes_a_node_stays_ready_while_its_agent_is_replaced(
    text: str, status: tuple[int, bool]
) -> None:
    environment = {"PODWIRE_NODE_NAME": "n1"}
    cni = settle(host_name="h", text=text, file_name="f", environment=environment).config.cni
    assert (cni.status_grace_s, cni.status_on_exhaustion) == status


def test_the_default_store_is_in_the_state_directory() -> None:
    assert read(CIDRS + 'state_dir = "/x/y"').config.store.store == "sqlite:///x/y/store.db"


OTHER_VALUES: dict[str, tuple[str, Any]] = {
    "node_name": ("node-2", "node-2"),
    "node_address": ("192.0.2.1", ipaddress.ip_address("192.0.2.1")),
    "node_interface": ("ens[0-9]*", "ens[0-9]*"),
    "cluster_cidrs": ("10.244.0.0/16", (ipaddress.ip_network("10.244.0.0/16"),)),
    "node_cidrs": (
        "10.244.1.0/24,fd00:1::/64",
        (ipaddress.ip_network("10.244.1.0/24"), ipaddress.ip_network("fd00:1::/64")),
    ),
    "run_dir": ("/run/x", Path("/run/x")),
    "state_dir": ("/var/x", Path("/var/x")),
    "bpf_dir": ("/sys/fs/bpf/x", Path("/sys/fs/bpf/x")),
    "store": ("sqlite:///x.db", "sqlite:///x.db"),
    "etcd_ca": ("/etc/x/ca.pem", "/etc/x/ca.pem"),
    "etcd_cert": ("/etc/x/node.pem", "/etc/x/node.pem"),
    "etcd_key": ("/etc/x/node.key", "/etc/x/node.key"),
    "etcd_user": ("podwire", "podwire"),
    "etcd_password_file": ("/etc/x/password", "/etc/x/password"),
    "kubeconfig": ("/etc/x/kubeconfig", "/etc/x/kubeconfig"),
    "routing": ("overlay", "overlay"),
    "tunnel_mode": ("classic", "classic"),
    "tunnel_port": ("4789", 4789),
    "mtu": ("1400", 1400),
    "translate_services": ("off", "off"),
    "masquerade": ("false", False),
    "masquerade_except": ("192.0.2.0/24", (ipaddress.ip_network("192.0.2.0/24"),)),
    "host_access": ("false", False),
    "conntrack_entries": ("65536", 65536),
    "conntrack_quota": ("100", 100),
    "policy_enforcement": ("always", "always"),
    "policy_audit": ("true", True),
    "policy_entries": ("4096", 4096),
    "identity_label_filter": ("app,!tier", ("app", "!tier")),
    "identity_wait_s": ("11", 11),
    "status_grace_s": ("120", 120),
    "status_on_exhaustion": ("false", False),
    "cni_install": ("true", True),
    "cni_conf_dir": ("/etc/other/net.d", Path("/etc/other/net.d")),
    "cni_bin_dir": ("/usr/lib/cni", Path("/usr/lib/cni")),
    "flow_ring": ("16", 16),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "metrics_listen": ("[::1]:9100", "[::1]:9100"),
}
"""Key -> text in flags and variables, value. Every key that can be set is here: see below."""


def _toml(key: str, text: str) -> str:
    kind = SETTINGS[key].kind
    raw = kind.from_text(text)
    return f"{key} = {show(tuple(raw) if isinstance(raw, list) else raw)}\n"


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_a_key_is_read_from_file_variable_and_flag(key: str) -> None:
    text, value = OTHER_VALUES[key]
    row = SETTINGS[key]
    base = "" if key == "node_cidrs" else CIDRS
    assert read(base + _toml(key, text)).config.get(key) == value
    assert read(base, **{row.environment: text}).config.get(key) == value
    assert read(base, flags=f"{row.flag} {text}").config.get(key) == value
    assert read(base, flags=f"{row.flag}={text}").config.get(key) == value
    assert value != row.default


@pytest.mark.parametrize("key", [key for key in SETTINGS if key not in OTHER_VALUES])
def test_a_key_of_a_later_capability_takes_only_what_works(key: str) -> None:
    row = SETTINGS[key]
    assert read(CIDRS + f"{key} = {show(row.default)}\n").config.get(key) == row.default
    other = {
        "list of strings": '["x"]',
        "boolean": "true",
        "string": '"x"',
        "path": '"/x"',
    }.get(row.kind.name) or {
        "ipam": '"delegated"',
        "datapath": '"netkit"',
        "endpoint_fanout": '"direct"',
    }[key]
    error = refused(CIDRS + f"{key} = {other}\n")
    assert "not built yet" in error.message
    assert [fault.path for fault in error.faults] == [key]


@pytest.mark.parametrize(
    ("file", "environment", "flags", "level", "source"),
    [
        ("", "", "", "info", None),
        ("error", "", "", "error", "file agent.toml"),
        ("error", "warning", "", "warning", "environment PODWIRE_LOG_LEVEL"),
        ("error", "warning", "debug", "debug", "flag --log-level"),
        ("error", "", "debug", "debug", "flag --log-level"),
    ],
)
def test_flag_beats_variable_beats_file_beats_default(
    file: str, environment: str, flags: str, level: str, source: str | None
) -> None:
    settled = read(
        CIDRS + (f'log_level = "{file}"' if file else ""),
        flags=f"--log-level {flags}" if flags else "",
        **({"PODWIRE_LOG_LEVEL": environment} if environment else {}),
    )
    assert settled.config.report.log_level == level
    assert settled.sources.get("log_level") == source


REFUSED = {
    "not TOML": ("node_name = ", "is not valid TOML"),
    "a key twice": ("mtu = 1\nmtu = 2\n", "is not valid TOML"),
    "unknown key": (CIDRS + "nod_name = 1\n", "unknown key 'nod_name'; did you mean 'node_name'?"),
    "a table": (CIDRS + "[agent]\nmtu = 0\n", "unknown key 'agent'"),
    "ranges beside pools": (
        'ipam = "pool"\nnode_cidrs = ["10.0.0.0/24"]',
        'with ipam "pool" addresses come out of pools alone',
    ),
    "number as text": (CIDRS + 'mtu = "1500"', "must be a whole number"),
    "bool as number": (CIDRS + "mtu = true", "must be a whole number"),
    "number as bool": (CIDRS + "masquerade = 1", "must be true or false"),
    "fraction": (CIDRS + "mtu = 1500.0", "must be a whole number"),
    "too large": (CIDRS + "mtu = 65536", "must be 576 to 65535 or 0"),
    "port 0": (CIDRS + "tunnel_port = 0", "must be 1 to 65535"),
    "no list": ('node_cidrs = "10.0.0.0/24"', "must be a list of CIDRs"),
    "no string in list": ("node_cidrs = [10]", "must be a string"),
    "no CIDR": ('node_cidrs = ["pods"]', "is not a CIDR"),
    "no length": ('node_cidrs = ["10.0.0.0"]', "write 10.0.0.0/32"),
    "host bits": ('node_cidrs = ["10.1.2.3/16"]', "write 10.1.0.0/16"),
    "overlap": ('node_cidrs = ["10.0.0.0/8", "10.1.0.0/16"]', "which overlap"),
    "same range twice": ('node_cidrs = ["10.0.0.0/8", "10.0.0.0/8"]', "which overlap"),
    "link-local": ('node_cidrs = ["169.254.1.0/24"]', "never a pod's"),
    "everything": ('node_cidrs = ["::/0"]', "never a pod's"),
    "outside": (CIDRS + 'cluster_cidrs = ["10.0.0.0/16"]', "in none of cluster_cidrs"),
    "other family": (CIDRS + 'cluster_cidrs = ["fd00::/48"]', "in none of cluster_cidrs"),
    "own address": (CIDRS + 'node_address = "10.244.1.1"', "in the pods' range"),
    "address and device": (
        CIDRS + 'node_address = "192.0.2.1"\nnode_interface = "eth0"',
        "set one of them",
    ),
    "loopback": (CIDRS + 'node_address = "127.0.0.1"', "no other machine can reach"),
    "no address": (CIDRS + 'node_address = "eth0"', "must be an IPv4 or IPv6 address"),
    "small for IPv6": ('node_cidrs = ["fd00::/64"]\nmtu = 1279', "IPv6 needs at least 1280"),
    "quota": (CIDRS + "conntrack_entries = 4096\nconntrack_quota = 5000", "more than conntrack"),
    "relative path": (CIDRS + 'run_dir = "run"', "must be an absolute path"),
    "upward path": (CIDRS + 'run_dir = "/run/../etc"', "without '..'"),
    "long socket": (CIDRS + f'run_dir = "/{"r" * 98}"', "the kernel takes 106"),
    "name with colon": (CIDRS + 'node_name = "a:b"', "must be letters"),
    "empty name": (CIDRS + 'node_name = ""', "must be letters"),
    "control character": (CIDRS + 'node_name = "a\\u0000b"', "control character"),
    "no name in a cluster": ('store = "kubernetes"', "pass spec.nodeName as PODWIRE_NODE_NAME"),
    "unknown store": (CIDRS + 'store = "mysql://x"', "must be sqlite:///PATH"),
    "unknown word": (CIDRS + 'log_level = "loud"', "must be one of debug, info, warning, error"),
    "listen": (CIDRS + 'metrics_listen = "localhost:9100"', "must be ADDRESS:PORT"),
    "listen port": (CIDRS + 'metrics_listen = "0.0.0.0:99999"', "must be ADDRESS:PORT"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(text: str, message: str) -> None:
    error = refused(text)
    assert message in error.message
    assert error.hint
    assert error.faults


def test_in_a_cluster_the_name_comes_from_the_pods_environment_or_a_kubeconfig_says_who_asks() -> (
    None
):
    named = read('store = "kubernetes"', PODWIRE_NODE_NAME="n1")
    assert named.config.node.node_name == "n1"
    outside = read('store = "kubernetes"\nkubeconfig = "/etc/kubernetes/admin.conf"')
    assert outside.config.node.node_name == "host-1"


def test_the_longest_socket_path_is_accepted() -> None:
    run_dir = "/" + "r" * 96
    assert len(f"{run_dir}/api.sock") == 106
    assert read(CIDRS + f'run_dir = "{run_dir}"').config.files.run_dir == Path(run_dir)


def test_all_faults_are_named_with_value_and_source() -> None:
    error = refused(
        CIDRS + 'mtu = 7\nlog_level = "loud"\nbogus = 1\n',
        flags="--tunnel-port x --nonsense y",
        PODWIRE_FLOW_RING="0",
    )
    for part in (
        "unknown flag '--nonsense'",
        "unknown key 'bogus' (file agent.toml)",
        "mtu = 7 (file agent.toml) must be 576 to 65535 or 0",
        'log_level = "loud" (file agent.toml) must be one of',
        "tunnel_port = 'x' (flag --tunnel-port) must be a whole number",
        "flow_ring = '0' (environment PODWIRE_FLOW_RING) must be 16 to 1048576",
    ):
        assert part in error.message
    assert len(error.faults) == 6


def test_an_unknown_variable_is_warned_of_and_others_are_ignored() -> None:
    settled = read(PODWIRE_SERVICE_HOST="10.0.0.1", PODWIRE_LAB="x", OTHER="y")
    assert settled.warnings == ["unknown variable 'PODWIRE_SERVICE_HOST'"]


@pytest.mark.parametrize(
    ("flags", "value"),
    [("--masquerade", True), ("--masquerade false", False), ("--masquerade --mtu 1400", True)],
)
def test_a_boolean_flag_may_stand_alone(flags: str, value: bool) -> None:
    assert read(CIDRS + "masquerade = false", flags=flags).config.datapath.masquerade is value


def test_a_flag_without_its_value_is_a_fault() -> None:
    assert "--mtu flag needs a value" in refused(flags="--mtu").message


def test_config_file_help_and_version_are_told_apart() -> None:
    parsed = parse_arguments(["--config", "/a", "-h", "--version"])
    assert (parsed.config, parsed.wants_help, parsed.wants_version) == (Path("/a"), True, True)


def test_the_page_of_settings_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown(), "run scripts/generate-docs"


def test_help_names_every_flag_and_its_default() -> None:
    text = help_text()
    for row in SETTINGS.values():
        assert f"  {row.flag} VALUE" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_settings_are_frozen_and_replaced_by_key() -> None:
    config = read().config
    changed = config.replace({"log_level": "debug", "masquerade": False})
    assert (changed.report.log_level, changed.datapath.masquerade) == ("debug", False)
    assert changed.node is config.node
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.node = changed.node  # type: ignore[misc]


@given(st.dictionaries(st.sampled_from(sorted(SETTINGS)), st.text(max_size=20)))
def test_any_text_is_a_valid_value_or_a_fault_of_its_own_key(said: dict[str, str]) -> None:
    environment = {SETTINGS[key].environment: text for key, text in said.items()}
    blamed: set[str] = set()
    try:
        settle(host_name="n", environment=environment, text=CIDRS, file_name="f")
    except InvalidConfiguration as error:
        blamed = {fault.path for fault in error.faults}
    assert blamed <= {*said, "node_cidrs"}


def test_what_the_agent_found_by_itself_needs_no_restart_at_a_reload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranges = (ipaddress.ip_network("10.244.0.0/16"),)
    settled = read()
    live = LiveConfig(settled, found={"cluster_cidrs": ranges})
    assert live.current.node.cluster_cidrs == ranges
    assert live.sources["cluster_cidrs"] == FOUND
    live.reload(lambda: read(CIDRS + 'log_level = "error"'))
    assert not caplog.messages or "restart" not in caplog.text
    assert live.current.node.cluster_cidrs == ranges
    live.reload(lambda: read(CIDRS + 'cluster_cidrs = ["10.0.0.0/8"]'))
    assert "restart" in caplog.text
    assert live.current.node.cluster_cidrs == ranges

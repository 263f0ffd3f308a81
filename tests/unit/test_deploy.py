"""The manifest is what the code needs and the documentation says: settings, paths, names, rights."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from podwire import __version__
from podwire.model.config import SETTINGS, AgentConfig
from podwire.model.config.settings import ENVIRONMENT_PREFIX
from podwire.model.store.kinds import CORE, KINDS
from podwire.store.kubernetes.api.access import HOST_VARIABLE, PORT_VARIABLE

ROOT: Final = Path(__file__).resolve().parents[2]
AGENT: Final = "podwire-agent"
CAPABILITIES: Final = {"NET_ADMIN", "NET_RAW", "BPF", "PERFMON", "SYS_ADMIN", "SYS_CHROOT"}
READ: Final = {"get", "list", "watch"}
"""What an agent may do with what others write."""


def read(name: str) -> list[dict[str, Any]]:
    text = ROOT.joinpath("deploy", name).read_text(encoding="utf-8")
    return [one for one in yaml.safe_load_all(text) if one]


DOCUMENTS: Final = read("podwire.yaml")
UNINSTALL: Final = read("podwire-uninstall.yaml")


def the(kind: str, name: str, documents: list[dict[str, Any]] = DOCUMENTS) -> dict[str, Any]:
    (found,) = (
        document
        for document in documents
        if document["kind"] == kind and document["metadata"]["name"] == name
    )
    return found


def pods_of(documents: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        if document["kind"] == "DaemonSet":
            yield document["spec"]["template"]["spec"]


POD: Final = next(pods_of(DOCUMENTS))
CONTAINER: Final = POD["containers"][0]
SETTINGS_MAP: Final = the("ConfigMap", "podwire")


def test_the_files_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate-manifest"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}run scripts/generate-manifest"


def test_all_crds_are_in_it() -> None:
    there = {
        document["metadata"]["name"]
        for document in DOCUMENTS
        if document["kind"].endswith("Definition")
    }
    files = ROOT.glob("deploy/crds/*.yaml")
    assert there == {yaml.safe_load(path.read_text("utf-8"))["metadata"]["name"] for path in files}


def test_it_names_the_image_that_is_built() -> None:
    images = {
        container["image"]
        for documents in (DOCUMENTS, UNINSTALL)
        for pod in pods_of(documents)
        for container in (*pod["initContainers"], *pod["containers"])
    }
    assert images == {f"localhost/podwire:{__version__}"}
    assert "IMAGE=localhost/podwire\n" in (ROOT / "deploy/image/build").read_text("utf-8")


def test_its_settings_are_settings() -> None:
    settings = tomllib.loads(SETTINGS_MAP["data"]["agent.toml"])
    assert settings == {"store": "kubernetes", "cni_install": True}
    variables = {
        variable["name"].removeprefix(ENVIRONMENT_PREFIX).lower()
        for variable in CONTAINER["env"]
        if variable["name"].startswith(ENVIRONMENT_PREFIX)
    }
    assert variables == {"node_name", "cluster_cidrs"}
    assert {*settings, *variables} <= set(SETTINGS)
    (name,) = (variable for variable in CONTAINER["env"] if variable["name"] == "PODWIRE_NODE_NAME")
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_the_api_server_may_be_reached_past_its_service() -> None:
    for name, key in ((HOST_VARIABLE, "k8s-service-host"), (PORT_VARIABLE, "k8s-service-port")):
        (variable,) = (one for one in CONTAINER["env"] if one["name"] == name)
        source = {"name": "podwire", "key": key, "optional": True}
        assert variable["valueFrom"] == {"configMapKeyRef": source}
        # An empty one would be taken as it is, and hide what kubelet says.
        assert key not in SETTINGS_MAP["data"]


def test_what_the_agent_keeps_outlives_its_pod() -> None:
    mounts = {volume_mount["mountPath"]: volume_mount for volume_mount in CONTAINER["volumeMounts"]}
    hosts = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in POD["volumes"]}
    defaults = AgentConfig()
    kept = (
        *(defaults.files.run_dir, defaults.files.state_dir, defaults.files.bpf_dir.parent),
        *(defaults.cni.cni_conf_dir, defaults.cni.cni_bin_dir),
    )
    for directory in kept:
        assert hosts[mounts[str(directory)]["name"]] == str(directory)
    assert mounts["/sys/fs/bpf"]["mountPropagation"] == "HostToContainer"
    assert hosts[mounts["/host/proc/sys/net"]["name"]] == "/proc/sys/net"


def test_the_agent_has_no_more_rights_on_its_node_than_it_needs() -> None:
    rights = CONTAINER["securityContext"]
    assert rights["privileged"] is False
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["capabilities"]["drop"] == ["ALL"]
    assert set(rights["capabilities"]["add"]) == CAPABILITIES
    privileged = [
        container["name"]
        for container in (*POD["initContainers"], *POD["containers"])
        if container["securityContext"].get("privileged")
    ]
    assert privileged == ["mount-bpffs"]


def test_its_pod_is_the_first_to_come_and_the_last_to_go() -> None:
    assert POD["hostNetwork"] is True
    assert POD["priorityClassName"] == "system-node-critical"
    assert POD["tolerations"] == [{"operator": "Exists"}]
    assert POD["enableServiceLinks"] is False
    update = the("DaemonSet", AGENT)["spec"]["updateStrategy"]["rollingUpdate"]
    assert update == {"maxUnavailable": "10%"}
    assert set(CONTAINER["resources"]) == {"requests"}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert "podwire status" in " ".join(CONTAINER[probe]["exec"]["command"])


def rules() -> Iterator[tuple[str, str, set[str]]]:
    """Group, resource and verbs, one by one."""
    for rule in the("ClusterRole", AGENT)["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield group, resource, set(rule["verbs"])


VERBS: Final[Mapping[tuple[str, str], set[str]]] = {
    ("", "nodes"): READ,
    ("", "nodes/status"): {"patch"},
    ("", "pods"): READ,
    ("", "services"): READ,
    ("discovery.k8s.io", "endpointslices"): READ,
    ("", "namespaces"): READ,
    ("", "events"): {"create", "patch"},
    ("networking.k8s.io", "networkpolicies"): READ,
    ("cilium.io", "ciliumnetworkpolicies"): READ,
    ("cilium.io", "ciliumclusterwidenetworkpolicies"): READ,
    ("cilium.io", "ciliumcidrgroups"): READ,
    ("apiextensions.k8s.io", "customresourcedefinitions"): {"list", "watch"},
    ("podwire.io", "ippools"): READ,
    ("podwire.io", "workloads"): READ,
    ("podwire.io", "nodes"): READ | {"create", "update", "patch"},
    ("podwire.io", "nodeendpoints"): READ | {"create", "update", "patch"},
    ("podwire.io", "identities"): READ | {"create"},
    ("podwire.io", "identities/status"): {"patch"},
    ("podwire.io", "ipblocks"): READ | {"create", "update", "delete"},
    ("podwire.io", "ipaddresses"): READ | {"create", "update", "delete"},
}
"""docs/kubernetes.md has this table for people."""


def test_the_agent_may_do_what_the_table_says() -> None:
    assert {(group, resource): verbs for group, resource, verbs in rules()} == VERBS


def test_what_every_agent_follows_it_may_read() -> None:
    readable = {(group or CORE, resource) for group, resource, verbs in rules() if verbs >= READ}
    wanted = {(kind.group, kind.plural.partition(".")[0]) for kind in KINDS}
    assert wanted - readable == set()


@pytest.mark.parametrize("kind", ["ValidatingAdmissionPolicy", "ClusterRole"])
def test_nothing_is_granted_or_judged_wholesale(kind: str) -> None:
    for document in DOCUMENTS:
        if document["kind"] == kind:
            text = yaml.safe_dump(document.get("rules", ()))
            assert "*" not in text
            assert document.get("spec", {}).get("failurePolicy", "Fail") == "Fail"


def test_uninstalling_reaches_all_that_installing_made() -> None:
    (pod,) = pods_of(UNINSTALL)
    (container,) = pod["initContainers"]
    script = container["command"][-1]
    for words in ("podwire cni uninstall", "podwire cleanup --all --yes", "rm -rf"):
        assert words in script
    assert pod["automountServiceAccountToken"] is False
    assert set(container["securityContext"]["capabilities"]["add"]) < CAPABILITIES

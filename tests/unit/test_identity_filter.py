"""Which labels make an identity."""

import pytest

from podwire.control.identity.filter import REMEMBERED_KEYS, LabelFilter
from podwire.model.errors import InvalidConfiguration

NAMESPACE = "k8s:io.kubernetes.pod.namespace=prod"
TEAM = "k8s:io.cilium.k8s.namespace.labels.team=a"
NETWORK = "cni:podwire.io/network=podwire"
NAME = "cni:podwire.io/name=web-7"

CASES: list[tuple[str, list[str], str, bool]] = [
    # what is shown, setting, label, part of the identity
    ("a pod's own label", [], "k8s:app=web", True),
    ("a container's own label", [], "cni:app=web", True),
    ("the namespace", [], NAMESPACE, True),
    ("a label of the namespace", [], TEAM, True),
    ("the network", [], NETWORK, True),
    ("the name", [], NAME, False),
    ("reserved", [], "reserved:host=", True),
    ("recommended labels", [], "k8s:app.kubernetes.io/name=web", True),
    ("service account", [], "k8s:io.cilium.k8s.policy.serviceaccount=web", True),
    ("pod-template-hash", [], "k8s:pod-template-hash=5d4", False),
    ("controller-revision-hash", [], "k8s:controller-revision-hash=5d4", False),
    ("controller-uid", [], "k8s:controller-uid=5d4", False),
    ("stateful set's pod name", [], "k8s:statefulset.kubernetes.io/pod-name=web-0", False),
    ("stateful set's pod index", [], "k8s:apps.kubernetes.io/pod-index=0", False),
    ("job index", [], "k8s:batch.kubernetes.io/job-completion-index=0", False),
    ("kubernetes.io", [], "k8s:kubernetes.io/arch=arm64", False),
    ("beta", [], "k8s:x.beta.kubernetes.io/y=1", False),
    ("not the dot of a pattern", [], "k8s:k8s-io=1", True),
    ("excluded by hand", ["!version"], "k8s:version=2", False),
    ("excluded for a source", ["!cni:version"], "k8s:version=2", True),
    ("excluded by prefix", ["!ver"], "k8s:version=2", False),
    ("not in the middle of a key", ["!sion"], "k8s:version=2", True),
    ("excluded by expression", ["!.*hash"], "k8s:my-hash=2", False),
    ("the longer include wins", ["!app", "app-kind"], "k8s:app-kind=2", True),
    ("the shorter include loses", ["app", "!app-kind"], "k8s:app-kind=2", False),
    ("equal length: excluded", ["app", "!app"], "k8s:app=2", False),
    ("an include makes a list of what is allowed", ["app"], "k8s:tier=2", False),
    ("what is included", ["k8s:app"], "k8s:app=web", True),
    ("what is included, of another source", ["k8s:app"], "cni:app=web", False),
    ("the namespace stays included", ["app"], NAMESPACE, True),
    ("namespace labels stay included", ["app"], TEAM, True),
    ("the network stays included", ["app"], NETWORK, True),
    ("the namespace cannot be excluded", ["!io.kubernetes.pod.namespace"], NAMESPACE, True),
    ("the network cannot be excluded", ["!podwire.io"], NETWORK, True),
    ("a namespace label can", ["!io.cilium.k8s.namespace.labels.team"], TEAM, False),
    ("the name cannot be included", ["podwire.io/name"], NAME, False),
    ("reserved cannot be excluded", ["!reserved:.*"], "reserved:host=", True),
    ("a default exclusion taken back", ["pod-template-hash.*", ".*"], "k8s:a=1", True),
    (
        "a longer include takes a default back",
        ["kubernetes.io/arch"],
        "k8s:kubernetes.io/arch=x",
        True,
    ),
]


@pytest.mark.parametrize(
    ("setting", "label", "chosen"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_labels_are_chosen_as_in_cilium(setting: list[str], label: str, chosen: bool) -> None:
    chosen_by = LabelFilter.parse(setting)
    assert (chosen_by.choose([label]) == (label,)) is chosen
    assert (chosen_by.choose([label]) == (label,)) is chosen  # from memory


@pytest.mark.parametrize("text", ["[", "!", "", "docker:app", "k8s:", "!k8s:(a"], ids=repr)
def test_a_pattern_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"identity_label_filter\[1\]") as raised:
        LabelFilter.parse(["app", text])
    assert [fault.path for fault in raised.value.faults] == ["identity_label_filter[1]"]


def test_memory_of_keys_is_bounded() -> None:
    chosen_by = LabelFilter.parse()
    labels = [f"cni:a{index}=1" for index in range(REMEMBERED_KEYS + 10)]
    assert chosen_by.choose(labels) == tuple(labels)
    assert len(chosen_by._decided) <= REMEMBERED_KEYS

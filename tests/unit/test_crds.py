"""The CRDs below deploy/crds: structural, of our names, and with every field that podwire writes."""

import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from podwire.control.cluster.facts import encode_node
from podwire.control.cluster.published import Publication, encode_endpoints
from podwire.control.documents.pools import FIELDS, RESERVED_MAX
from podwire.control.identity.key import IdentityKey
from podwire.control.identity.known import make_object
from podwire.control.ipam.documents import Block, ClaimedAddress, encode_block, encode_claimed
from podwire.control.ipam.pools import AddressRange
from podwire.model.cluster import NodeFacts
from podwire.model.endpoint import AttachmentKey
from podwire.model.identity import NamedPort
from podwire.model.ids import ContainerId, IdentityId, InterfaceName, NetworkName
from podwire.model.store.kinds import KINDS, Kind
from podwire.store.kubernetes.api.resources import OWN_GROUP, find_resource
from podwire.store.manifest import load_manifests

DIRECTORY: Final = Path(__file__).parents[2] / "deploy" / "crds"
CRDS: Final = {
    path.stem: yaml.load(path.read_text(), yaml.CSafeLoader)
    for path in sorted(DIRECTORY.glob("*.yaml"))
}
OWN: Final = [kind for kind in KINDS if kind.group == OWN_GROUP]
NETWORK = ipaddress.ip_network("10.0.0.0/26")
ADDRESS = ipaddress.ip_address("10.0.0.1")
SOME = AddressRange(ADDRESS, ADDRESS)
ATTACHMENT = AttachmentKey(NetworkName("podwire"), ContainerId("c" * 64), InterfaceName("eth0"))

WRITTEN: Final[dict[str, Mapping[str, Any]]] = {
    "nodes": encode_node(
        NodeFacts(
            name="n1",
            instance="0123456789abcdef",
            epoch=3,
            addresses=(ADDRESS,),
            pod_cidrs=(NETWORK,),
            tunnel_addresses=(ADDRESS,),
            tunnel_mac="06:00:00:00:00:01",
            blocks={NETWORK: 2},
            holds=(IdentityId(70000),),
            claims={NETWORK: -2, ADDRESS: 7},
        )
    ),
    "nodeendpoints": encode_endpoints(
        Publication("n1", 1, 2, {ADDRESS: IdentityId(70000)}), [NETWORK]
    ),
    "identities": make_object(
        70000, IdentityKey(("k8s:app=x",), (NamedPort("http", 6, 80),))
    ).document,
    "ipblocks": encode_block(Block(NETWORK, "p", "n1", 1, (SOME,))),
    "ipaddresses": encode_claimed(ClaimedAddress(ADDRESS, "p", "n1", ATTACHMENT)),
    "ippools": {"spec": dict.fromkeys(FIELDS)},
    "workloads": {"spec": {"namePattern": "db-*", "network": "n", "labels": {"app": "x"}}},
}
"""What podwire writes of each kind, with a value in every field; of pools only which fields there are."""


def schema_of(plural: str) -> Any:
    return CRDS[plural]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def walk(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from walk(schema[name], f"{path}[]")


def test_every_own_kind_has_its_crd() -> None:
    assert {kind.plural for kind in OWN} <= CRDS.keys()
    assert CRDS.keys() - {kind.plural for kind in OWN} == {"endpoints"}


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.plural)
def test_names_are_those_of_the_command_line(kind: Kind) -> None:
    found = CRDS[kind.plural]
    names, spec = found["spec"]["names"], found["spec"]
    assert found["metadata"]["name"] == find_resource(kind.plural).full_name
    assert (names["kind"], names["plural"], names["singular"]) == (
        kind.name,
        kind.plural,
        kind.singular,
    )
    assert set(kind.short_names) <= set(names.get("shortNames", ()))
    assert spec["scope"] == ("Namespaced" if kind.namespaced else "Cluster")
    assert [version["name"] for version in spec["versions"]] == [
        api_version.removeprefix(f"{OWN_GROUP}/") for api_version in kind.api_versions
    ]


@pytest.mark.parametrize("plural", CRDS)
def test_nothing_is_opaque_or_without_bounds(plural: str) -> None:
    for path, schema in walk(schema_of(plural)):
        if path.count(".") < 2 and path not in (".spec", ".status"):
            continue
        assert schema["type"] in ("string", "integer", "boolean", "array", "object"), path
        assert "x-kubernetes-preserve-unknown-fields" not in schema, path
        assert "default" not in schema, f"{path}: what is read would not be what was written"
        if schema["type"] == "object":
            assert "properties" in schema or "maxProperties" in schema, path
        bound = {"string": {"maxLength", "enum"}, "array": {"maxItems"}}.get(schema["type"])
        assert bound is None or bound & schema.keys(), path


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_reader_of_yaml_reads_the_same(path: Path) -> None:
    """`n` and `on` as names of properties would be booleans to readers of YAML 1.1, kubectl among them."""
    [manifest] = load_manifests(path.read_bytes(), path.name)
    assert manifest.document == yaml.safe_load(path.read_text())
    names = [path for path, schema in walk(manifest.document["spec"]) if not isinstance(path, str)]
    assert not names


@pytest.mark.parametrize("plural", WRITTEN)
def test_what_podwire_writes_is_in_the_schema_and_nothing_else(plural: str) -> None:
    spec = schema_of(plural)["properties"]["spec"]
    written = WRITTEN[plural]["spec"]
    assert written.keys() | _FOR_NEWER.get(plural, set()) == spec["properties"].keys()
    if plural != "ippools":
        assert not list(find_faults(written, spec, "spec"))


_FOR_NEWER: Final = {"nodes": {"requires"}}
"""What only a newer podwire may write."""


def find_faults(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    if not isinstance(value, kinds[schema["type"]]):
        yield f"{path} is {value!r}, not {schema['type']}"
    elif isinstance(value, dict):
        known = schema.get("properties")
        for name, inner in value.items():
            if known is not None and name not in known:
                yield f"{path}.{name} is unknown"
            else:
                found = known[name] if known is not None else schema["additionalProperties"]
                yield from find_faults(inner, found, f"{path}.{name}")
        yield from (
            f"{path}.{one} is missing" for one in schema.get("required", ()) if one not in value
        )
    elif isinstance(value, list):
        for inner in value:
            yield from find_faults(inner, schema["items"], f"{path}[]")
    elif isinstance(value, str) and len(value) > schema.get("maxLength", 1 << 20):
        yield f"{path} is too long"


def test_limits_are_those_of_the_documents() -> None:
    pool = schema_of("ippools")["properties"]["spec"]["properties"]
    assert pool["reserved"]["maxItems"] == RESERVED_MAX
    assert pool["use"]["enum"] == ["pods", "nodes"]


IMMUTABLE = {
    "identities": "self == oldSelf",
    "ipblocks": "self.cidr",
    "ipaddresses": "self.address",
}


@pytest.mark.parametrize(("plural", "rule"), IMMUTABLE.items(), ids=IMMUTABLE)
def test_what_names_an_object_cannot_be_changed(plural: str, rule: str) -> None:
    [found] = schema_of(plural)["properties"]["spec"]["x-kubernetes-validations"]
    assert found["rule"].startswith(rule)

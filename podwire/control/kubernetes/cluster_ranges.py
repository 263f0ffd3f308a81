"""The ranges of all pods of a cluster, as kubeadm noted them.

Called by the agent's start where the setting `cluster_cidrs` is empty. Pure: whoever calls reads the object, and the
YAML in it. An address that is in these ranges never counts as the world, so ranges that cannot be read are refused.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from podwire.model.documents.lenient import members_of, text_of
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import InvalidConfiguration
from podwire.model.store import ObjectKey, StoredObject

KUBEADM_KEY: Final = ObjectKey("configmaps", "kube-system", "kubeadm-config")
SET_IT: Final = "set cluster_cidrs (key cluster-cidrs of ConfigMap podwire) to the ranges of all pods of the cluster"
_DOCUMENT: Final = "ClusterConfiguration"


def find_configuration(stored: StoredObject | None) -> str:
    """Give the document of kubeadm's ConfigMap; "" when the cluster was not made by kubeadm."""
    return text_of(members_of(stored.document, "data"), _DOCUMENT) if stored is not None else ""


def decode_pod_subnets(document: Mapping[str, Any]) -> tuple[IPNetwork, ...]:
    """Read networking.podSubnet, one range or one of each family; () when it has none. InvalidConfiguration."""
    text = members_of(document, "networking").get("podSubnet")
    parts = [part.strip() for part in str(text or "").split(",")]
    try:
        return tuple(ipaddress.ip_network(part) for part in parts if part)
    except ValueError as error:
        raise InvalidConfiguration(
            f"read the ranges of all pods: networking.podSubnet of ConfigMap {KUBEADM_KEY.namespace}/"
            f"{KUBEADM_KEY.name} is {str(text)[:80]!r}: {error}",
            hint=SET_IT,
        ) from error

"""Find names in a policy that nothing has: labels that are kept out of identities, CIDR groups that do not exist.

Called by the command line, to warn. Such a policy is valid and is enforced as it is written: a group may come later,
and the filter is a setting of the node. Pure. Invariant: what is found here matches nothing, whatever pods there are.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from podwire.control.identity.filter import SETTING, LabelFilter
from podwire.control.policy.rule import ANY_SOURCE, GroupMention, LabelMention, Mention
from podwire.control.policy.rules_cilium import decode_cilium_policy
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.model.errors import Fault
from podwire.model.labels import SOURCE_CNI, SOURCE_K8S
from podwire.model.store.kinds import CILIUM_CLUSTERWIDE_POLICY, CILIUM_POLICY, NETWORK_POLICY

_SOURCES_OF_ENDPOINTS: Final = (SOURCE_K8S, SOURCE_CNI)


def find_mentions(document: Mapping[str, Any]) -> list[Mention]:
    """Give what a valid document names, in its order; nothing of what is no policy."""
    mentions: list[Mention] = []
    if document.get("kind") == NETWORK_POLICY.name:
        decode_network_policy(document, mentions)
    elif document.get("kind") in (CILIUM_POLICY.name, CILIUM_CLUSTERWIDE_POLICY.name):
        decode_cilium_policy(document, mentions)
    return mentions


def find_unmatched(
    mentions: Collection[Mention], label_filter: LabelFilter, groups: Collection[str]
) -> list[Fault]:
    """Give those mentions that nothing can match, each with why. `groups`: the names of those that there are."""
    unmatched: list[Fault] = []
    for mention in mentions:
        if isinstance(mention, GroupMention):
            if mention.name not in groups:
                unmatched.append(
                    Fault(mention.path, f"names {mention.name!r}: there is no such CiliumCIDRGroup")
                )
        elif not _may_be_had(mention, label_filter):
            unmatched.append(
                Fault(
                    mention.path,
                    f"selects by {mention.key!r}, which {SETTING} keeps out of identities",
                )
            )
    return unmatched


def _may_be_had(label: LabelMention, label_filter: LabelFilter) -> bool:
    """Tell whether an endpoint's identity may have the label; what is reserved has no filter."""
    sources = _SOURCES_OF_ENDPOINTS if label.source == ANY_SOURCE else (label.source,)
    return bool(label_filter.choose([f"{source}:{label.key}=" for source in sources]))

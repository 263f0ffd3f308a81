"""What a policy names that need not exist: labels and groups, with the place where it names them.

Collected by the decoders of policies for `control.policy.unmatched`. Values only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LabelMention:
    """A label by which a policy selects endpoints, and where it says so. Whether any can have it the filter knows."""

    path: str
    source: str
    key: str


@dataclass(frozen=True, slots=True)
class GroupMention:
    """A CiliumCIDRGroup that a policy names, and where. Whether there is one the store knows."""

    path: str
    name: str


Mention = LabelMention | GroupMention

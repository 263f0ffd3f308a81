"""Break the connections between machines of a lab: take links down, and partition nodes.

Used by `lab.labs`. A partition consists of rules on the underlay: rules by port for frames that a bridge forwards, and
rules by address for packets that the underlay routes from one subnet to another or receives itself (the store).
"""

from collections.abc import Sequence
from typing import Final

from podwire.kernel import netns
from podwire.kernel.nft import Nftables
from podwire.lab.topology import STORE, LabPlan
from podwire.model.errors import InvalidRequest

TABLE: Final = "lab_partition"


def addresses_of(plan: LabPlan, place: str) -> Sequence[str]:
    """Give the underlay addresses of a node or of the store; NotFound, InvalidRequest."""
    if place == STORE:
        if plan.shape.store == "sqlite":
            raise InvalidRequest(
                "cut off the store: it is a file of this machine",
                hint="build the lab with --store etcd",
            )
        return plan.store_addresses
    return plan.node(place).addresses


def apply_partitions(plan: LabPlan, pairs: Sequence[tuple[str, str]]) -> None:
    """Make exactly these pairs be apart; none = all nodes reach each other."""
    # `delete` fails when there is no table, so it is made first. All commands are one transaction of nftables: at no
    # moment are the nodes joined.
    commands = [f"table {family} {TABLE}\ndelete table {family} {TABLE}" for family in _HOOKS]
    rules = {
        "bridge": [rule for pair in pairs if STORE not in pair for rule in _port_rules(*pair)],
        "inet": [rule for pair in pairs for rule in _address_rules(plan, *pair)],
    }
    for family, body in rules.items():
        chains = "\n".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; policy accept;\n"
            + "\n".join(body)
            + "\n}"
            for hook in _HOOKS[family]
        )
        if body:
            commands.append(f"table {family} {TABLE} {{\n{chains}\n}}")
    netns.run_at(netns.named_path(plan.underlay_namespace), lambda: _run_nft("\n".join(commands)))


# Frames between two ports of a bridge pass only the hooks of family `bridge`, unless br_netfilter is loaded, which
# belongs to the whole machine and is not the lab's to load or to rely on. What the underlay routes or takes passes
# `inet`.
_HOOKS: Final = {"bridge": ("forward",), "inet": ("input", "forward", "output")}


def _run_nft(commands: str) -> None:
    with Nftables() as nft:
        nft.run(commands)


def _port_rules(node: str, other: str) -> list[str]:
    """Part two ports of node bridge, whatever addresses they speak under."""
    return [f'iifname "{a}" oifname "{b}" drop' for a, b in ((node, other), (other, node))]


def _address_rules(plan: LabPlan, node: str, other: str) -> list[str]:
    """Part what the underlay routes or takes for itself: only nodes' own addresses are seen there."""
    rules = []
    for left in addresses_of(plan, node):
        for right in addresses_of(plan, other):
            if (":" in left) == (":" in right):
                family = "ip6" if ":" in left else "ip"
                rules.append(f"{family} saddr {left} {family} daddr {right} drop")
                rules.append(f"{family} saddr {right} {family} daddr {left} drop")
    return rules

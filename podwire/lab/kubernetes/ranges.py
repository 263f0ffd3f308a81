"""The ranges of a cluster, for each family: where its nodes are, what pods and what services get."""

import ipaddress
from typing import Final

import msgspec

from podwire.lab.kubernetes.api_server import SERVICE_CIDR

_FIRST_HOST: Final = 10


class Ranges(msgspec.Struct, frozen=True):
    """Those of one family."""

    underlay: ipaddress.IPv4Network | ipaddress.IPv6Network
    pods: str
    services: str

    @property
    def router(self) -> str:
        """The address of the control plane, which is also the way to everywhere else."""
        return str(self.underlay[1])

    def node_address(self, number: int) -> str:
        """Give the address of a node; the first one has number 1."""
        return str(self.underlay[_FIRST_HOST + number - 1])

    def with_length(self, address: str) -> str:
        """Write an address as a device gets it."""
        return f"{address}/{self.underlay.prefixlen}"


RANGES: Final = {
    "4": Ranges(ipaddress.ip_network("192.0.2.0/24"), "10.244.0.0/16", SERVICE_CIDR),
    # A range of services has 20 bits at most.
    "6": Ranges(ipaddress.ip_network("fd99::/64"), "fd10:244::/48", "fd10:96::/108"),
}


def of(families: str) -> tuple[Ranges, ...]:
    """Give the ranges of some families, as `46` names them; the first one is preferred."""
    return tuple(RANGES[family] for family in families)


def join_pods(families: str) -> str:
    """Write the ranges of pods as Kubernetes' programs take them."""
    return ",".join(family.pods for family in of(families))


def join_services(families: str) -> str:
    """Write the ranges of services as Kubernetes' programs take them."""
    return ",".join(family.services for family in of(families))

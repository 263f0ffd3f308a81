"""Which ports of this host lead to which pod.

ADD asks before it writes anything down, and serves the ports as its last step; every end of an endpoint withdraws them
first. What is to be in force is computed from the endpoints each time, so nothing here can disagree with the journal.
Two pods cannot have one port, but for two sandboxes of one pod: the newer one has it, and when that ends while the
older one lives, the older one has it again. Called under the node's turn.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from podwire.control.endpoint.table import EndpointTable
from podwire.model.documents.reader import list_faults
from podwire.model.endpoint import PROTOCOL_NAMES, PROTOCOLS, EndpointRecord, IPAddress, Phase
from podwire.model.errors import Fault, InvalidConfiguration
from podwire.model.interfaces import Datapath, HostPortTable, HostSocket, PodSocket

EACH_ADDRESS: Final[Mapping[int, IPAddress]] = {
    4: ipaddress.IPv4Address("0.0.0.0"),
    6: ipaddress.IPv6Address("::"),
}


_NAMED_IN_MESSAGE: Final = 5
_PATH: Final = "runtimeConfig.portMappings"


class ReservedPort(msgspec.Struct, frozen=True):
    """A port that no pod may have, and what this host needs it for."""

    socket: HostSocket
    why: str


class HostPorts(msgspec.Struct, frozen=True):
    """The ports of this host that lead to pods."""

    table: EndpointTable
    datapath: Datapath
    reserved: Sequence[ReservedPort] = ()

    def refuse_taken(self, record: EndpointRecord) -> None:
        """Raise InvalidConfiguration if a port cannot be given to the endpoint; every such port is named."""
        if not record.host_ports:
            return
        faults = (*_list_without_address(record), *self._list_taken(record))
        if faults:
            listed = list_faults(faults, len(faults), _NAMED_IN_MESSAGE)
            raise InvalidConfiguration(
                f"attach {record.key}: {listed}",
                hint="ask for another host port or host address, or remove the pod that has it",
                faults=faults,
            )

    def serve(self, record: EndpointRecord) -> None:
        """Lead the ports of an endpoint that is complete to it, beside those of all others."""
        if not record.host_ports:
            return
        if any(_is_asked_by_loopback(socket) for socket, _ in translate(record)):
            self.datapath.let_loopback_out(record)
        self.datapath.write_host_ports(in_force([*self._list_living(), record]))

    def withdraw(self, record: EndpointRecord) -> None:
        """Lead the ports of an ended endpoint nowhere, or back to an older sandbox of its pod."""
        if record.host_ports:
            self.datapath.write_host_ports(in_force(self._list_living()), dict(translate(record)))

    def _list_living(self) -> list[EndpointRecord]:
        # A restart finds endpoints whose ADD was cut off in the table as well: those are ended next.
        return [
            endpoint.record
            for endpoint in self.table
            if endpoint.record.phase is Phase.LIVE and not endpoint.is_ending
        ]

    def _list_taken(self, record: EndpointRecord) -> Iterator[Fault]:
        others = [other for other in self._list_living() if not _are_of_one_pod(record, other)]
        theirs = [(socket, other) for other in others for socket, _ in translate(other)]
        for socket, _ in translate(record):
            for taken, other in theirs:
                if _overlap(socket, taken):
                    owner = f"{other.namespace}/{other.pod} (container {other.key.container_id})"
                    yield Fault(_PATH, f"{_name(socket)} leads to pod {owner} already")
            for kept in self.reserved:
                if _overlap(socket, kept.socket):
                    yield Fault(_PATH, f"{_name(socket)} is {kept.why}")


def in_force(records: Iterable[EndpointRecord]) -> HostPortTable:
    """Compute what is served of living endpoints: of two that ask for one port, the newer one has it."""
    return {
        socket: pod
        for record in sorted(records, key=lambda record: record.id)
        for socket, pod in translate(record)
    }


def translate(record: EndpointRecord) -> Iterator[tuple[HostSocket, PodSocket]]:
    """Give what each wanted port of the host leads to, for each family that the endpoint has."""
    for port in record.host_ports:
        host = ipaddress.ip_address(port.host_ip) if port.host_ip else None
        for address in record.addresses:
            if host is None or host.version == address.version:
                socket = HostSocket(
                    host or EACH_ADDRESS[address.version],
                    PROTOCOLS[port.protocol],
                    port.host_port,
                )
                yield socket, PodSocket(address, port.pod_port)


def _list_without_address(record: EndpointRecord) -> Iterator[Fault]:
    families = {address.version for address in record.addresses}
    for port in record.host_ports:
        if port.host_ip and (version := ipaddress.ip_address(port.host_ip).version) not in families:
            message = f"the pod has no IPv{version} address for host address {port.host_ip}"
            yield Fault(_PATH, message)


def _are_of_one_pod(one: EndpointRecord, other: EndpointRecord) -> bool:
    return bool(one.pod_uid) and one.pod_uid == other.pod_uid


def _overlap(one: HostSocket, other: HostSocket) -> bool:
    return (
        (one.protocol, one.port) == (other.protocol, other.port)
        and one.address.version == other.address.version
        and (
            one.address == other.address
            or one.address.is_unspecified
            or other.address.is_unspecified
        )
    )


def _is_asked_by_loopback(socket: HostSocket) -> bool:
    """Tell whether what this host sends to 127.0.0.1 may meet the port."""
    address = socket.address
    return address.version == 4 and (address.is_unspecified or address.is_loopback)


def _name(socket: HostSocket) -> str:
    where = "" if socket.address.is_unspecified else f" of {socket.address}"
    return f"{PROTOCOL_NAMES[socket.protocol]} port {socket.port}{where}"

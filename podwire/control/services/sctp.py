"""Which ports of SCTP are translated: those that every back end has too, because the checksum covers the ports.

Called by `control.services.catalogue`. Pure. Invariant: a port that cannot be translated is known all the same, with
the stack as its only back end: one that is not known is refused.
"""

import ipaddress
from collections.abc import Iterable, Sequence

from podwire.control.services.facts import ServicePort, SliceFacts
from podwire.control.services.reading import Left
from podwire.control.services.records import Claims
from podwire.model.endpoint import PROTOCOLS
from podwire.model.interfaces import BackEnd


def keeps_port(port: ServicePort, slices: Iterable[SliceFacts]) -> bool:
    """Tell whether a port can be translated. All back ends of both families count, ready or not, so that it does not
    come and go with who answers."""
    return port.protocol != PROTOCOLS["SCTP"] or all(
        slice_.ports.get((port.name, port.protocol), port.port) == port.port
        for slice_ in slices
        if slice_.addresses
    )


def stack_of(version: int, protocol: int) -> BackEnd:
    """Give what stands for the stack."""
    nowhere = ipaddress.IPv4Address(0) if version == 4 else ipaddress.IPv6Address(0)
    return BackEnd(nowhere, 0, protocol)


def is_translated(claims: Claims) -> bool:
    """Tell whether any port of a service is."""
    return any(frontend.port and not _is_left(ends) for frontend, ends in claims.items())


def list_left_ports(claims: Claims) -> tuple[Left, ...]:
    """Name the ports of a service that are left to the stack."""
    ports = {frontend.port for frontend, ends in claims.items() if _is_left(ends)}
    return tuple(
        Left(
            "sctp",
            f"port {port}/sctp is left to the stack: a back end has another targetPort, and the programs change no"
            " ports of SCTP, which its checksum covers",
        )
        for port in sorted(ports)
    )


def _is_left(back_ends: Sequence[BackEnd]) -> bool:
    return any(back_end.is_stack for back_end in back_ends)

"""Find an endpoint by any form of id that people and runtimes use. Pure; called by the API's handlers."""

from collections.abc import Callable, Iterable, Mapping

from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.model.errors import Conflict, NotFound, UndecodableRequest
from podwire.model.ids import ContainerId, EndpointId, InterfaceName

_DIGITS_MAX = 10


def find_endpoint(table: EndpointTable, text: str) -> Endpoint:
    """Find by any form of id. Raises NotFound, UndecodableRequest for text that is no id, Conflict if several match."""
    kind, colon, rest = text.partition(":")
    if text.isascii() and text.isdigit():
        # Python refuses to read thousands of digits, and no number of an endpoint has more than ten.
        endpoints = [table.get(EndpointId(int(text)))] if len(text) <= _DIGITS_MAX else []
    elif colon and rest and kind in _FINDERS:
        endpoints = list(_FINDERS[kind](table, rest))
    else:
        raise UndecodableRequest(
            f"find endpoint {text!r}: this is not an endpoint id",
            hint=f"a number, or one of {', '.join(f'{finder}:...' for finder in _FINDERS)}",
        )
    present = [endpoint for endpoint in endpoints if endpoint is not None]
    if not present:
        raise NotFound(f"find endpoint {text!r}: there is none", hint="see `podwire endpoint list`")
    if len(present) > 1:
        listed = ", ".join(
            f"{endpoint.record.id} ({endpoint.record.key.if_name})" for endpoint in present
        )
        raise Conflict(
            f"find endpoint {text!r}: it names several: {listed}",
            hint="use the number, or cni-attachment-id:CID:IFNAME",
        )
    return present[0]


def _by_attachment(table: EndpointTable, text: str) -> Iterable[Endpoint]:
    container_id, _, if_name = text.partition(":")
    return table.list_by_container(
        ContainerId(container_id), InterfaceName(if_name) if if_name else None
    )


def _by_pod(table: EndpointTable, text: str) -> Iterable[Endpoint]:
    namespace, _, pod = text.partition("/")
    return table.list_by_pod(namespace, pod)[:1]  # the newest owns the name


def _by_address(table: EndpointTable, text: str) -> Iterable[Endpoint]:
    try:
        endpoint = table.get_by_address(text)
    except ValueError:
        raise UndecodableRequest(f"find endpoint: {text!r} is not an address") from None
    return [endpoint] if endpoint else []


_FINDERS: Mapping[str, Callable[[EndpointTable, str], Iterable[Endpoint]]] = {
    "cni-attachment-id": _by_attachment,
    "container-id": lambda table, text: table.list_by_container(ContainerId(text)),
    "pod-name": _by_pod,
    "ipv4": _by_address,
    "ipv6": _by_address,
}

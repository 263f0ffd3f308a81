"""End the host ports of pods that the plugin `portmap` serves, because their network chained it when they came.

Called by `agent.cni.requests` before a DEL is carried out. Networks of podwire chained `portmap` until podwire served
host ports itself, and runtimes DEL by the network that they find now. What `portmap` left in the tables of iptables
would go on leading the pod's ports to its address, whoever has that next. So its DEL is called here, among the
runtime's files, with what the runtime says of the ports (docs/decisions/0010). A network in which somebody chains
`portmap` today declares the capability there, so this DEL hears of no ports and does nothing.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from podwire.model.endpoint import AttachmentKey
from podwire.model.request import AttachRequest
from podwire.model.wire import Frame

PORTMAP: Final = "portmap"
_VERSION: Final = "1.0.0"
"""The newest that every `portmap` in use speaks."""

Run = Callable[[str, Mapping[str, str], bytes, int | None], str]
"""Runs a plugin with environment and stdin in a mount namespace; gives what went wrong, "" = nothing."""

_log = logging.getLogger(__name__)


class ChainedPortmap(msgspec.Struct, frozen=True):
    """`leaves_host_ports` tells of a living attachment whether a chained plugin may serve its ports."""

    leaves_host_ports: Callable[[AttachmentKey], bool]
    run: Run

    def has(self, request: AttachRequest) -> bool:
        """Tell whether a request ends an attachment that may have ports by portmap."""
        return bool(request.port_mappings and request.key and self.leaves_host_ports(request.key))

    def end(self, request: AttachRequest, frame: Frame, mount_fd: int | None) -> None:
        """Call portmap's DEL; a failure is only logged."""
        # Raised, it would fail our DEL, and a runtime repeats a failed DEL for ever.
        network = {
            "cniVersion": _VERSION,
            "name": request.network,
            "type": PORTMAP,
            "runtimeConfig": {"portMappings": json.loads(request.port_mappings)},
        }
        wrong = self.run(PORTMAP, frame.environment, json.dumps(network).encode(), mount_fd)
        container = frame.environment.get("CNI_CONTAINERID", "")
        if wrong:
            _log.warning(
                "host ports that portmap serves could not be ended; remove its rules for the container by hand",
                extra={"container": container, "error": wrong},
            )
        else:
            _log.info("ended host ports that portmap served", extra={"container": container})

"""The network that a container runtime reads: which plugins it chains, and which CNI versions it offers. Pure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from podwire.model.installation.files import LAUNCHER_FILE, PORTMAP_FILE

NETWORK: Final = "podwire"
"""Never changes: runtimes remember attachments by the network's name."""
BASE_VERSION: Final = "1.0.0"
"""What every runtime and every plugin in use speaks. Older runtimes refuse a list that names only 1.1.0."""
NEWER_VERSION: Final = "1.1.0"
"""Brings STATUS and GC; offered if each plugin of the list speaks it."""
DEFAULT_SOCKET: Final = Path("/run/podwire/cni.sock")
"""Where the launcher looks unasked (launcher/launcher.h)."""


def make_conflist(socket: Path, portmap_speaks: Sequence[str] | None) -> bytes:
    """Write the network for an agent at `socket`; `portmap_speaks` None = there is no such plugin to chain."""
    own: dict[str, Any] = {
        "type": LAUNCHER_FILE,
        "capabilities": {"bandwidth": True, "ips": True, "mac": True},
    }
    if socket != DEFAULT_SOCKET:
        own["socket"] = str(socket)
    plugins = [own]
    if portmap_speaks is not None:
        plugins.append({"type": PORTMAP_FILE, "capabilities": {"portMappings": True}})
    versions = [BASE_VERSION]
    if portmap_speaks is None or NEWER_VERSION in portmap_speaks:
        versions.append(NEWER_VERSION)
    network = {
        "cniVersion": BASE_VERSION,
        "cniVersions": versions,
        "name": NETWORK,
        "plugins": plugins,
    }
    return json.dumps(network, indent=2).encode() + b"\n"

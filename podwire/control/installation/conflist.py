"""The network that a container runtime reads: what it hands to podwire, and which CNI versions it offers. Pure."""

import json
from pathlib import Path
from typing import Any, Final

from podwire.model.installation.files import LAUNCHER_FILE

NETWORK: Final = "podwire"
"""Never changes: runtimes remember attachments by the network's name."""
BASE_VERSION: Final = "1.0.0"
"""What every runtime and every plugin in use speaks. Older runtimes refuse a list that names only 1.1.0."""
NEWER_VERSION: Final = "1.1.0"
"""Brings STATUS and GC."""
DEFAULT_SOCKET: Final = Path("/run/podwire/cni.sock")
"""Where the launcher looks unasked (launcher/launcher.h)."""


def make_conflist(socket: Path) -> bytes:
    """Write the network for an agent at `socket`."""
    own: dict[str, Any] = {
        "type": LAUNCHER_FILE,
        "capabilities": {"bandwidth": True, "ips": True, "mac": True, "portMappings": True},
    }
    if socket != DEFAULT_SOCKET:
        own["socket"] = str(socket)
    network = {
        "cniVersion": BASE_VERSION,
        "cniVersions": [BASE_VERSION, NEWER_VERSION],
        "name": NETWORK,
        "plugins": [own],
    }
    return json.dumps(network, indent=2).encode() + b"\n"

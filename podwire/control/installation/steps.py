"""Install and uninstall: the steps that are missing, in an order in which no runtime ever finds half of it.

What the network says that a runtime reads is here, too. Called by the agent's installer and by `podwire cni`.
Invariants: the network comes last and goes first, because it is what makes a runtime call the rest; it comes only when
an ADD would succeed. A `loopback` of somebody else is neither replaced nor removed.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from podwire.model.installation.files import (
    CONFLIST_FILE,
    LAUNCHER_FILE,
    LOOPBACK_FILE,
    CniDirectories,
    CniFiles,
    Loopback,
)

NETWORK: Final = "podwire"
"""Never changes: runtimes remember attachments by the network's name."""
BASE_VERSION: Final = "1.0.0"
"""What every runtime and every plugin in use speaks. Older runtimes refuse a list that names only 1.1.0."""
NEWER_VERSION: Final = "1.1.0"
"""Brings STATUS and GC."""
DEFAULT_SOCKET: Final = Path("/run/podwire/cni.sock")
"""Where the launcher looks unasked (launcher/launcher.h)."""

MISSING: Final = "missing"
DIFFERS: Final = "differs"
INSTALLED: Final = "installed"
FOREIGN: Final = "foreign"
"""Somebody else's plugin, which does just as well."""


class Installation(msgspec.Struct, frozen=True):
    """What an agent wants in the two directories."""

    directories: CniDirectories
    launcher: bytes
    socket: Path

    def install(self, *, serves: Callable[[], bool]) -> list[str]:
        """Bring about what is missing or differs; tells which files were written.

        `serves` says whether an ADD would succeed now, and is asked only when the network is to be written. If it says
        no, the network stays as it is, and the next call tries again.
        """
        files, written = self.directories.read(), []
        if files.launcher != self.launcher:
            self.directories.write_launcher(self.launcher)
            written.append(LAUNCHER_FILE)
        if files.loopback is Loopback.MISSING:
            self.directories.link_loopback()
            written.append(LOOPBACK_FILE)
        # Last: a runtime calls what a network names as soon as it finds the network, and counts its node as ready.
        wanted = make_conflist(self.socket)
        if files.conflist != wanted and serves():
            self.directories.write_conflist(wanted)
            written.append(CONFLIST_FILE)
        return written

    def states(self, files: CniFiles) -> dict[str, str]:
        """Say of each file whether it is there as it should be."""
        return {
            LAUNCHER_FILE: _compare(files.launcher, self.launcher),
            LOOPBACK_FILE: {
                Loopback.MISSING: MISSING,
                Loopback.OURS: INSTALLED,
                Loopback.FOREIGN: FOREIGN,
            }[files.loopback],
            CONFLIST_FILE: _compare(files.conflist, make_conflist(self.socket)),
        }

    def is_complete(self, files: CniFiles) -> bool:
        """Tell whether a runtime finds all it needs."""
        return not {MISSING, DIFFERS}.intersection(self.states(files).values())


def uninstall(directories: CniDirectories) -> list[str]:
    """Remove what is ours; tells which files are gone. Done twice it removes nothing."""
    files, removed = directories.read(), []
    # First: once the network is gone no runtime calls what goes next.
    if files.conflist is not None:
        directories.remove_conflist()
        removed.append(CONFLIST_FILE)
    if files.loopback is Loopback.OURS:
        directories.remove_loopback()
        removed.append(LOOPBACK_FILE)
    if files.launcher is not None:
        directories.remove_launcher()
        removed.append(LAUNCHER_FILE)
    return removed


def find_obstacles(files: CniFiles) -> Iterator[str]:
    """Name what keeps the installed network from being used, and what to do."""
    if files.earlier:
        names = ", ".join(files.earlier)
        yield (
            f"{names} sorts before {CONFLIST_FILE}: runtimes read that network first, and pods get it instead of"
            " podwire's; remove it, or rename it so that it comes later"
        )


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


def _compare(there: bytes | None, wanted: bytes) -> str:
    if there is None:
        return MISSING
    return INSTALLED if there == wanted else DIFFERS

"""What podwire puts where a container runtime looks for plugins and networks, and what else is there.

Values of `control.installation`, read and written by `cni.directories`.
"""

from enum import Enum
from typing import Final, Protocol

import msgspec

from podwire.model.wire import CNI_PROGRAM

LAUNCHER_FILE: Final = CNI_PROGRAM
CONFLIST_FILE: Final = "05-podwire.conflist"
LOOPBACK_FILE: Final = "loopback"
"""The plugin that every runtime asks to set a pod's own loopback device up, by this name."""


class Loopback(Enum):
    """Whose plugin `loopback` is there."""

    MISSING = "missing"
    OURS = "ours"
    """A link to our launcher, which does that, too."""
    FOREIGN = "foreign"


class CniFiles(msgspec.Struct, frozen=True):
    """What both directories hold; None = the file is not there."""

    launcher: bytes | None = None
    conflist: bytes | None = None
    loopback: Loopback = Loopback.MISSING
    earlier: tuple[str, ...] = ()
    """Files of other networks that a runtime reads before ours."""


class CniDirectories(Protocol):
    """The directory of plugins and the one of networks. Raises StorageFailure."""

    def read(self) -> CniFiles:
        """Look at both; a directory that does not exist is empty."""

    def write_launcher(self, program: bytes) -> None:
        """Put the program there in one step: a runtime finds the old one or the new one, whole."""

    def write_conflist(self, text: bytes) -> None:
        """Put the network there in one step."""

    def link_loopback(self) -> None:
        """Let `loopback` lead to the launcher."""

    def remove_conflist(self) -> None:
        """Take the network away; absent is fine."""

    def remove_loopback(self) -> None:
        """Take our link away; absent is fine."""

    def remove_launcher(self) -> None:
        """Take the program away; absent is fine."""

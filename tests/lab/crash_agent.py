"""The agent, with a death at a chosen side effect. Only the crash tests start it.

Every narrow waist through which the agent changes anything is counted here, before and after: netlink sends, BPF
map updates and deletes, pins, nftables, journal writes, and by the interpreter's own audit events every file that is
made, written (sysctls are files), renamed or removed. At the number in `PWT_CRASH_AT` the process kills itself with
SIGKILL. Counting begins with the first request of the command in `PWT_CRASH_COMMAND` that comes when the file
`PWT_CRASH_ARM` is there (START: with the process; FOLD: with a fold of the journal, which counts for no other one), and
`PWT_CRASH_LOG` gets one line for each point.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from podwire.agent import health, main
from podwire.agent.duties.cluster import applier as cluster_applier
from podwire.control.attach.service import AttachService
from podwire.journal import background_writer
from podwire.journal.records import SqliteJournal
from podwire.kernel import bpf, netlink, nft

_MODIFYING = os.O_WRONLY | os.O_RDWR
_MESSAGES = {
    16: "new link",
    17: "delete link",
    19: "set link",
    20: "new address",
    24: "new route",
    25: "delete route",
    28: "new neighbour",
    36: "new queue",
    44: "new filter",
}
"""include/uapi/linux/rtnetlink.h"""
_FILE_EVENTS = frozenset(
    {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}
)


class Fuse:
    """Counts points; burns at one of them."""

    def __init__(self) -> None:
        self._at = int(os.environ["PWT_CRASH_AT"])
        self.command = os.environ["PWT_CRASH_COMMAND"]
        self._lock = threading.Lock()
        self._log_fd = os.open(
            os.environ["PWT_CRASH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        )
        self._count = 0
        self._armed = self.command == "START"
        self._quiet = threading.local()

    def arm(self, command: str) -> None:
        """Begin to count with the first request of the wanted command."""
        if command == self.command and os.path.exists(os.environ["PWT_CRASH_ARM"]):
            self._armed = True

    def point(self, name: str) -> None:
        """Pass a point, or die at it."""
        if not self._armed or getattr(self._quiet, "inside", False):
            return
        with self._lock:
            self._count += 1
            os.write(self._log_fd, f"{self._count} {name}\n".encode())
            if self._count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Put a point before and one after a call; what it does inside is one effect."""

        @wraps(call)
        def counted(*arguments: Any, **more: Any) -> Any:
            self.point(f"before {name}")
            try:
                return call(*arguments, **more)
            finally:
                self.point(f"after {name}")

        return counted

    def aside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out what does not belong to the request: it may happen at any moment."""

        @wraps(call)
        def quiet(*arguments: Any, **more: Any) -> Any:
            self._quiet.inside = True
            try:
                return call(*arguments, **more)
            finally:
                self._quiet.inside = False

        return quiet

    def watch_files(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The interpreter's audit hook: files that are made, renamed, removed."""
        if event in _FILE_EVENTS:
            self.point(f"{event} {arguments[0]}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _MODIFYING:
            self.point(f"open {arguments[0]}")


def install(fuse: Fuse) -> None:
    """Put the fuse into every waist."""
    send = netlink.NetlinkSocket._transmit

    def counted_send(
        self: netlink.NetlinkSocket, data: bytes | bytearray, call: str, *, changes: bool
    ) -> None:
        name = "netlink " + ",".join(
            _MESSAGES.get(kind, "other") for kind, *_ in netlink.split_messages(bytes(data))
        )
        if changes:
            fuse.point(f"before {name}")
        send(self, data, call, changes=changes)
        if changes:
            fuse.point(f"after {name}")

    netlink.NetlinkSocket._transmit = counted_send  # type: ignore[method-assign]
    for name in ("update", "update_fd", "delete", "update_batch", "delete_batch"):
        setattr(bpf.Map, name, fuse.around(f"map {name}", getattr(bpf.Map, name)))
    bpf.Descriptor.pin = fuse.around("pin", bpf.Descriptor.pin)  # type: ignore[method-assign]
    for name in ("write", "remove"):
        setattr(SqliteJournal, name, fuse.around(f"journal {name}", getattr(SqliteJournal, name)))
    # When it comes is not for a request to say: it has runs of its own.
    folding = fuse.around("journal fold", SqliteJournal.fold)
    folded = _arming(fuse, "FOLD", folding) if fuse.command == "FOLD" else fuse.aside(folding)
    SqliteJournal.fold = folded  # type: ignore[method-assign]
    nft.Nftables.run = fuse.around("nft", nft.Nftables.run)  # type: ignore[method-assign]
    health.AliveFile.refresh = fuse.aside(health.AliveFile.refresh)  # type: ignore[method-assign]
    # What is done because of other nodes is done again in whole at the next start, and at any moment.
    cluster_applier.Applier._work = fuse.aside(cluster_applier.Applier._work)  # type: ignore[method-assign]
    # The test waits at each of its points until nothing happens any more.
    background_writer.LOOK_S = 0.01  # type: ignore[misc]
    for command, method in (("ADD", "add"), ("ADD", "add_at_once"), ("DEL", "delete")):
        call = getattr(AttachService, method)
        setattr(AttachService, method, _arming(fuse, command, call))
    sys.addaudithook(fuse.watch_files)


def _arming(fuse: Fuse, command: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def armed(*arguments: Any) -> Any:
        fuse.arm(command)
        return call(*arguments)

    return armed


if __name__ == "__main__":
    install(Fuse())
    sys.exit(main.main())

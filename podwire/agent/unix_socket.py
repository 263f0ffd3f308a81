"""A socket that only root can reach, for the launchers' door and the API's.

Opened by `agent.main`, which holds the lock of the directory. Invariant: nobody but root can connect at any moment,
because the mode is set between bind(2) and listen(2), and before listen nobody can connect at all.
"""

import os
import socket
import stat
from pathlib import Path

from podwire.model.errors import StorageFailure

# Cut to net.core.somaxconn (listen(2)). A launcher beyond it gets EAGAIN and tries again after a pause.
BACKLOG = 1024
"""Connections that the kernel keeps for us: a burst of launchers must find room."""


def open_unix_socket(path: Path) -> socket.socket:
    """Make a root-only socket in place of what a dead agent left; listens, so it can be connected
    to at once.

    Raises StorageFailure when something that is no socket is in the way, or the directory cannot be
    written.
    """
    try:
        _remove_stale_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(path))
            # Between bind(2) and listen(2): before listen nobody can connect, so no moment is open to others.
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise StorageFailure(
            f"open socket {str(path)!r}: {error.strerror or error}",
            hint="the agent must be able to write the directory; see the setting run_dir",
        ) from error
    return listener


def _remove_stale_socket(path: Path) -> None:
    """The caller holds the directory's lock: a socket that is here has no owner any more."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise StorageFailure(
                f"open socket {str(path)!r}: a file that is not a socket has its name",
                hint="look at that file and move it away",
            )
        os.unlink(path)
    except FileNotFoundError:
        return

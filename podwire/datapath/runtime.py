"""What podwire asks of this machine because of a container runtime: news of its directories, a plugin of its own.

Used by the agent's installer and by the launchers' door, which must not reach the kernel themselves.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from podwire.kernel import spawn
from podwire.kernel.inotify import DirectoryWaker
from podwire.model.errors import PodwireError
from podwire.model.store import Waker

_PLUGIN_TIMEOUT_S: Final = 8.0
"""Below the time that a launcher waits for its DEL."""
_ENV: Final = "/usr/bin/env"
_USUAL_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHOWN_CHARACTERS: Final = 400


def watch_directories(*paths: Path) -> Waker:
    """Wait for changes in directories that exist. Raises KernelFailure."""
    return DirectoryWaker(*paths)


def run_chained(
    plugin: str, variables: Mapping[str, str], stdin: bytes, mount_fd: int | None
) -> str:
    """Run a plugin of the runtime's as the runtime would, among its files; gives what went wrong, "" = nothing.

    `mount_fd`: the runtime's mount namespace, None = ours.
    """
    # The agent's own file system may be that of an image, which has neither the plugin nor what that executes: `env`
    # looks for the plugin where the runtime does.
    path = ":".join(filter(None, (variables.get("CNI_PATH"), variables.get("PATH"), _USUAL_PATH)))
    try:
        done = spawn.run(
            [_ENV, plugin],
            input_bytes=stdin,
            environment={**variables, "PATH": path},
            place=spawn.Place(mount_fd=mount_fd),
            timeout_s=_PLUGIN_TIMEOUT_S,
        )
    except PodwireError as error:
        return error.message
    said = (done.stdout or done.stderr).decode(errors="replace").strip()
    return f"exit status {done.status}: {said[:_SHOWN_CHARACTERS]}" if done.status else ""

"""What installing for a container runtime asks of this machine: news of its directories, and its plugins' versions.

Used by the agent's installer and by `podwire cni`, which must not reach the kernel themselves.
"""

import json
import logging
from pathlib import Path
from typing import Any, Final

from podwire.kernel import spawn
from podwire.kernel.inotify import DirectoryWaker
from podwire.model.errors import PodwireError
from podwire.model.store import Waker

_ASK_TIMEOUT_S: Final = 10.0
_log = logging.getLogger(__name__)


def watch_directories(*paths: Path) -> Waker:
    """Wait for changes in directories that exist. Raises KernelFailure."""
    return DirectoryWaker(*paths)


def ask_versions(plugin: Path) -> tuple[str, ...]:
    """Ask a plugin for the CNI versions that it speaks; empty when it does not say (it hangs, or cannot run here)."""
    variables = {"CNI_COMMAND": "VERSION", "CNI_PATH": str(plugin.parent)}
    # Plugins before 1.0 insist on these, and do not read them.
    variables |= dict.fromkeys(("CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS"), "dummy")
    try:
        done = spawn.run(
            [str(plugin)],
            input_bytes=b'{"cniVersion": "1.0.0"}',
            environment=variables,
            timeout_s=_ASK_TIMEOUT_S,
        )
        said: Any = json.loads(done.stdout)
        return tuple(str(version) for version in said["supportedVersions"])
    except (PodwireError, ValueError, KeyError, TypeError) as error:
        _log.warning(
            "a plugin does not say which versions it speaks",
            extra={"path": str(plugin), "error": str(error)},
        )
        return ()

"""The network configuration list on disk: what it says, and how it gets there without a runtime seeing half of it.

Called by `podwire cni install` and by an agent that installs itself. Never executes a plugin: the caller asks each one
for its versions. Invariant: the file under its final name is whole at every moment, and the network's name in it never
changes, since runtimes find their cached results by it. Runtimes load the first file of the directory in the order of
names, and containerd looks again only when a file is written, renamed or removed *there*: so the temporary file lies
in the same directory, under a name that no runtime reads, and is renamed.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from podwire.model.errors import InvalidConfiguration, StorageFailure
from podwire.model.ids import is_valid_network_name
from podwire.model.wire import DEFAULT_SOCKET, SUPPORTED_CNI_VERSIONS

FILE_NAME: Final = "05-podwire.conflist"
NETWORK_NAME: Final = "podwire"
PLUGIN_TYPE: Final = "podwire-cni"
BASE_VERSION: Final = "1.0.0"
"""The list's `cniVersion`: older libcni refuses a list that names only a newer one."""
CAPABILITIES: Final = ("bandwidth", "ips", "mac")
"""What podwire-cni itself carries out; `portMappings` belongs to a chained portmap."""
PORTMAP: Final[Mapping[str, Any]] = {"type": "portmap", "capabilities": {"portMappings": True}}

_TEMPORARY_SUFFIX: Final = ".podwire-tmp"
_MODE: Final = 0o644


def make_plugin(*, socket: str = DEFAULT_SOCKET, mtu: int = 0, **more: Any) -> dict[str, Any]:
    """Make podwire's own entry of the list; settings that have their default are left out."""
    plugin: dict[str, Any] = {"type": PLUGIN_TYPE}
    if socket != DEFAULT_SOCKET:
        plugin["socket"] = socket
    if mtu:
        plugin["mtu"] = mtu
    return {**plugin, **more, "capabilities": dict.fromkeys(CAPABILITIES, True)}


def choose_versions(spoken: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Choose the list's versions from what each plugin's VERSION reports: 1.0.0, and 1.1.0 where all speak it.

    Raises InvalidConfiguration when a plugin does not even speak 1.0.0: the chain could not run.
    """
    common = set(SUPPORTED_CNI_VERSIONS).intersection(*spoken)
    if BASE_VERSION not in common:
        raise InvalidConfiguration(
            f"choose the versions of the network: not every plugin of it speaks {BASE_VERSION}",
            hint="install newer versions of the chained plugins, or take them out of the list",
        )
    from_base = SUPPORTED_CNI_VERSIONS[SUPPORTED_CNI_VERSIONS.index(BASE_VERSION) :]
    return tuple(version for version in from_base if version in common)


def encode_conflist(
    plugins: Sequence[Mapping[str, Any]],
    versions: Sequence[str] = (BASE_VERSION,),
    *,
    name: str = NETWORK_NAME,
) -> bytes:
    """Write a list of `plugins`, podwire's own first."""
    if not is_valid_network_name(name):
        raise InvalidConfiguration(
            f"write a network configuration: {name!r} is no network name",
            hint="use letters, digits, '_', '.' and '-', beginning with a letter or digit",
        )
    document = {
        "cniVersion": BASE_VERSION,
        "cniVersions": list(versions),
        "name": name,
        "plugins": [dict(plugin) for plugin in plugins],
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def install_conflist(directory: Path, content: bytes, *, file_name: str = FILE_NAME) -> bool:
    """Put the file in place, durably; False when it was there with this content and nothing was touched.

    `directory` is made if missing. Raises StorageFailure; what was there before then stays.
    """
    path = directory / file_name
    temporary = directory / f".{file_name}{_TEMPORARY_SUFFIX}"
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if _read(path) == content:
            return False
        try:
            _write_durably(temporary, content)
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_directory(directory)
    except OSError as error:
        raise _failure("install", path, error) from error
    return True


def remove_conflist(directory: Path, *, file_name: str = FILE_NAME) -> bool:
    """Take the file away; False when there was none.

    Only `uninstall` may call this, after the last pod: without a list, runtimes cannot even delete pods.
    """
    path = directory / file_name
    try:
        path.unlink()
        _sync_directory(directory)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _failure("remove", path, error) from error
    return True


def list_earlier_files(directory: Path, *, file_name: str = FILE_NAME) -> Sequence[str]:
    """Name the configurations that runtimes would load instead of ours: they come first in the order of names."""
    try:
        names = sorted(one.name for one in directory.iterdir())
    except FileNotFoundError:
        return []
    suffixes = (".conf", ".conflist", ".json")
    return [name for name in names if name.endswith(suffixes) and name < file_name]


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write_durably(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _failure(verb: str, path: Path, error: OSError) -> StorageFailure:
    return StorageFailure(
        f"{verb} network configuration {str(path)!r}: {error.strerror}",
        hint="the directory must be writable and have space; see the settings cni_conf_dir and --conf-dir",
    )

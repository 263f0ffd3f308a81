"""Endpoint directories below the run directory: what an endpoint is and what its programs were told.

`journal.background_writer` writes them for regeneration, DEL and restore. They are for people: nothing here is ever
read back, and the journal is authoritative. A build writes `<id>_next/` and swaps it in by rename, so a reader finds a
whole `<id>/` or none; what a failed build wanted stays in `<id>_next_fail/`.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from podwire.model.endpoint import EndpointRecord
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig

_log = logging.getLogger(__name__)

_SUFFIXES = ("", "_next", "_next_fail", "_old")


class RunDirectories:
    """The directories below `root` (`<run_dir>/endpoints`). Its calls raise OSError when the disk is full."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, record: EndpointRecord, config: EndpointConfig) -> None:
        target, following = self._path(record.id), self._path(record.id, "_next")
        _write(following, record, config)
        old = self._path(record.id, "_old")
        _remove(old)
        with contextlib.suppress(FileNotFoundError):
            # rename(2) does not replace a directory that has content: the old one steps aside first.
            os.rename(target, old)
        os.rename(following, target)
        _remove(old)
        _remove(self._path(record.id, "_next_fail"))

    def keep_failure(self, record: EndpointRecord, config: EndpointConfig, cause: str) -> None:
        failed = self._path(record.id, "_next_fail")
        _remove(failed)
        _write(failed, record, config)
        (failed / "cause.txt").write_text(cause + "\n", encoding="utf-8")

    def remove(self, endpoint_id: EndpointId) -> None:
        for suffix in _SUFFIXES:
            _remove(self._path(endpoint_id, suffix))

    def prune(self, keep: Iterable[EndpointId]) -> None:
        """Remove the directories of all other endpoints, and what an interrupted swap left."""
        kept = {str(endpoint_id) for endpoint_id in keep}
        for path in list(self._root.iterdir()):
            if path.name not in kept:
                _remove(path)

    def _path(self, endpoint_id: EndpointId, suffix: str = "") -> Path:
        return self._root / f"{endpoint_id}{suffix}"


def _write(directory: Path, record: EndpointRecord, config: EndpointConfig) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    document = {"record": record, "config": config}
    (directory / "endpoint.json").write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    (directory / "ep_config.h").write_text(_header(record, config), encoding="utf-8")


def _header(record: EndpointRecord, config: EndpointConfig) -> str:
    device = record.device
    lines = [
        f"/* endpoint {record.id}: {record.key}; told to the programs as rows, never compiled in */",
        f"#define PW_INSTANCE {record.id}u",
        f"#define PW_HOST_IFINDEX {device.host_ifindex}u",
        f'#define PW_HOST_DEVICE "{device.host_name}"',
        f'#define PW_POD_MAC "{device.pod_mac}"',
        f'#define PW_HOST_MAC "{device.host_mac}"',
        f'#define PW_IPV4 "{record.ipv4}"',
        f'#define PW_IPV6 "{record.ipv6}"',
        f"#define PW_MTU {device.mtu}u",
        f"#define PW_IDENTITY {config.identity}u",
        f"#define PW_SLOT {config.slot}u",
        f"#define PW_POLICY_REVISION {config.policy_revision}u",
        f"#define PW_DENY_EGRESS {int(config.deny_egress)}",
        f"#define PW_DENY_INGRESS {int(config.deny_ingress)}",
    ]
    return "\n".join(lines) + "\n"


def _remove(path: Path) -> None:
    """Remove a directory, or a file that lies in its place; what cannot be removed is for the next prune."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning(
            "remove an endpoint's directory failed", extra={"path": str(path), "error": str(error)}
        )

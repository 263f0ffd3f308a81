"""Hand-made OCI images: a layout in a tar file, from busybox alone, since neither rig nor tests reach a registry.

The image has busybox under the name of each applet and nothing else. Debian's static busybox cannot resolve names, so
containers use addresses.
"""

import hashlib
import io
import json
import platform
import tarfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BUSYBOX: Final = Path("/bin/busybox")
APPLETS: Final = ("cat", "echo", "httpd", "ip", "ls", "nc", "ping", "sh", "sleep", "wget")
BUSYBOX_IMAGE: Final = "localhost/pwt/busybox:1"
PAUSE_IMAGE: Final = "localhost/pwt/pause:1"
SERVED: Final = "served\n"
"""What its web server answers."""
_FOREVER: Final = ("/bin/sleep", "2147483647")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_MEDIA = "application/vnd.oci.image"


def write_layout(path: Path, references: Sequence[str]) -> None:
    """Write an OCI layout whose one image has these references."""
    layer = _make_layer()
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Cmd": list(_FOREVER), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _describe(config, "config.v1+json"),
            "layers": [_describe(layer, "layer.v1.tar")],
        }
    ).encode()
    index = {
        "schemaVersion": 2,
        "manifests": [
            {**_describe(manifest, "manifest.v1+json"), "annotations": _name(reference)}
            for reference in references
        ],
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps(index).encode(),
        **{f"blobs/sha256/{_hash(blob)}": blob for blob in (layer, config, manifest)},
    }
    # By rename: nodes are started at the same time, and one would import what another has half written.
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
    with tarfile.open(temporary, "w") as archive:
        for name, data in files.items():
            _add_file(archive, name, data)
    temporary.rename(path)


def _make_layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "www"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        _add_file(archive, "bin/busybox", BUSYBOX.read_bytes(), mode=0o755)
        _add_file(archive, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
        _add_file(archive, "www/index.html", SERVED.encode())
        for applet in APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
    return buffer.getvalue()


def _add_file(archive: tarfile.TarFile, name: str, data: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _name(reference: str) -> Mapping[str, str]:
    return {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference,
    }


def _describe(blob: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{_hash(blob)}"


def _hash(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()

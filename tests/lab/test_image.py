"""The container image: what is in it, how large it is, under which name. Skipped where it was not built."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pytest

from podwire import __version__
from podwire.lab.kubernetes.networks.agents import ROOT

LIMIT_BYTES: Final = 120_000_000
ARCHIVES: Final = sorted((ROOT / "build" / "image").glob(f"podwire-{__version__}-*.tar"))

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not ARCHIVES, reason="the image is not built: deploy/image/build"),
]


@pytest.fixture(scope="module")
def archive() -> Iterator[tarfile.TarFile]:
    with tarfile.open(ARCHIVES[0]) as opened:
        yield opened


def read_json(archive: tarfile.TarFile, name: str) -> Any:
    file = archive.extractfile(name)
    assert file is not None
    return json.load(file)


def blob(descriptor: dict[str, Any]) -> str:
    return f"blobs/{descriptor['digest'].replace(':', '/')}"


@pytest.fixture(scope="module")
def members(archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """Every file of the image, by its path."""
    (entry,) = read_json(archive, "index.json")["manifests"]
    found: dict[str, tarfile.TarInfo] = {}
    for layer in read_json(archive, blob(entry))["layers"]:
        file = archive.extractfile(blob(layer))
        with tarfile.open(fileobj=file) as opened:
            found |= {member.name.rstrip("/"): member for member in opened}
    return found


def test_it_has_the_name_that_the_manifest_says(archive: tarfile.TarFile) -> None:
    (entry,) = read_json(archive, "index.json")["manifests"]
    name = entry["annotations"]["org.opencontainers.image.ref.name"]
    assert name == f"localhost/podwire:{__version__}"


def test_it_has_what_a_node_needs(members: dict[str, tarfile.TarInfo]) -> None:
    for path in ("bin/podwire", "bin/podwire-agent", "bin/podwire-cni"):
        assert f"usr/local/{path}" in members
    for path in ("usr/sbin/nft", "usr/bin/sh", "usr/bin/python3", "usr/bin/mount"):
        assert path in members
    native = [path for path in members if "/podwire/native/" in path]
    assert sum(path.endswith(".bpf.o") for path in native) == len(list(ROOT.glob("bpf/*.bpf.c")))
    assert any(path.endswith("/kernel/_libbpf.abi3.so") for path in members)


@pytest.mark.parametrize("name", ["clang*", "gcc*", "pip*", "apt*", "dpkg*", "bash"])
def test_it_has_nothing_that_builds_or_installs(
    members: dict[str, tarfile.TarInfo], name: str
) -> None:
    programs = [path for path in members if path.startswith(("usr/bin/", "usr/sbin/", "bin/"))]
    linked = {path for path in programs if members[path].issym()}  # busybox's applets
    assert not [program for program in set(programs) - linked if PurePosixPath(program).match(name)]


def test_python_finds_everything_compiled(members: dict[str, tarfile.TarInfo]) -> None:
    """The root is read-only: what is not compiled would be compiled at every start."""
    sources = [Path(path) for path in members if "/podwire/" in path and path.endswith(".py")]
    missing = [
        path
        for path in sources
        if not any(
            str(path.parent / "__pycache__" / f"{path.stem}.cpython-3{minor}.pyc") in members
            for minor in range(11, 20)
        )
    ]
    assert sources
    assert not missing


def test_it_is_small(members: dict[str, tarfile.TarInfo]) -> None:
    assert sum(member.size for member in members.values() if member.isfile()) < LIMIT_BYTES

"""The wheel, installed where there is no checkout: its agent loads its programs and attaches a pod."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire import __version__
from tests.lab.rig import ROOT, Rig, run

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

HIDE = 'for part in podwire bpf launcher build; do mount -t tmpfs none "$0/$part"; done; exec "$@"'
"""Shell, in a mount namespace of its own: the checkout $0 has neither sources nor anything compiled."""


@pytest.fixture(scope="module")
def wheel() -> Path:
    return Path(run(str(ROOT / "scripts" / "wheel")).strip())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A venv with the wheel in it. What podwire depends on is borrowed from this checkout's, because tests have no
    network; podwire itself is not: a path in a .pth file does not bring that path's own .pth files along."""
    directory = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(directory, with_pip=False)
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(
        sys.executable, "-m", "pip", "--python", str(directory / "bin/python"), *install, str(wheel)
    )
    packages = next(directory.glob("lib/python3*/site-packages"))
    packages.joinpath("borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield directory
    shutil.rmtree(directory)


def test_a_wheel_has_what_the_kernel_and_runtimes_get(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.name.removesuffix(".c") for path in ROOT.glob("bpf/*.bpf.c")}
    native = "podwire/native"
    objects = {name for name in names if name.startswith(f"{native}/bpf/")}
    assert objects == {f"{native}/bpf/{source}.o" for source in sources}
    assert f"{native}/bin/podwire-cni" in names
    assert "podwire/kernel/_libbpf.abi3.so" in names
    assert not {name for name in names if name.startswith("tests/")}


def test_the_same_sources_make_the_same_wheel(wheel: Path) -> None:
    before = wheel.read_bytes()
    ROOT.joinpath("build/stamps/wheel").unlink(missing_ok=True)  # so that it is built again
    assert run(str(ROOT / "scripts" / "wheel")).strip() == str(wheel)
    assert wheel.read_bytes() == before


def test_an_installed_agent_serves_pods_without_a_checkout(installed: Path) -> None:
    launcher = next(installed.glob("lib/python3*/site-packages/podwire/native/bin/podwire-cni"))
    introduced = subprocess.run([launcher], env={}, capture_output=True, text=True, check=True)
    assert introduced.stderr.startswith(f"podwire-cni {__version__}:")
    with Rig() as rig:
        rig.agent_command = (
            *("env", "-u", "PYTHONPATH", "unshare", "--mount", "sh", "-ec", HIDE, str(ROOT)),
            str(installed / "bin" / "podwire-agent"),
        )
        rig.start()
        pod = rig.make_pod_namespace()
        assert rig.cni("ADD", "c1", pod).ok
        assert rig.cni("DEL", "c1", pod).ok
        status = str(installed / "bin" / "podwire"), "status", "--agent"
        assert "(ready)" in run(*status, str(rig.directory / "api.sock"))

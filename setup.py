"""The native part of the package: setuptools takes `cffi_modules` and commands of its own only from here, not from
pyproject.toml.
"""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithNativeFiles(build_py):
    """Put BPF objects and launcher into the package, so that what is installed needs neither checkout nor clang."""

    def run(self) -> None:
        super().run()
        # In a checkout podwire.model.installation.shipped finds them in build/.
        if self.editable_mode:
            return
        for part in ("bpf", "launcher"):
            subprocess.run(["make", "--no-print-directory", "-C", str(ROOT / part)], check=True)
        objects = ROOT.joinpath("build", "bpf").glob("*.bpf.o")
        for path in (p for p in objects if not p.name.endswith(".test.bpf.o")):
            self._take(path, "bpf", 0o644)
        self._take(ROOT / "build" / "bin" / "podwire-cni", "bin", 0o755)

    def _take(self, path: Path, directory: str, mode: int) -> None:
        target = Path(self.build_lib, "podwire", "native", directory, path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(mode)


setup(
    cffi_modules=["podwire/kernel/libbpf_build.py:ffibuilder"],
    cmdclass={"build_py": BuildWithNativeFiles},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

"""scripts/own-root in a chroot: whoever joins the mount namespace of what it runs stays below the chroot's root."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.kernel

OWN_ROOT: Final = Path(__file__).resolve().parents[2] / "scripts" / "own-root"
JOIN: Final = """
import ctypes, os
libc = ctypes.CDLL(None)
assert libc.setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0x20000) == 0
print(os.path.exists("/only-here"))
"""
SHARED: Final = ("usr", "bin", "lib", "lib64", "etc", "proc")
ROOT: Final = """
set -e
cd "$1"
[ -z "$2" ] || { mount --bind . .; cd "$1"; }
for name in $3; do
    [ ! -e "/$name" ] || { mkdir "$name"; mount --rbind "/$name" "$name"; }
done
touch only-here
cp "$4" own-root
shift 4
exec chroot . "$@"
"""


@pytest.mark.parametrize("is_mount", [False, True], ids=["in any directory", "in a mount"])
@pytest.mark.parametrize("command", [("/own-root",), ()], ids=["with own-root", "without"])
def test_who_joins_the_namespace_stays_in_the_chroot(
    tmp_path: Path, is_mount: bool, command: tuple[str, ...]
) -> None:
    python = os.path.realpath(sys.executable)
    in_private = ("unshare", "--mount", "--propagation", "private", "sh", "-c", ROOT, "sh")
    where = (str(tmp_path), "mount" if is_mount else "", " ".join(SHARED), str(OWN_ROOT))
    moved = (python, *command) if command else ()
    done = subprocess.run(
        [*in_private, *where, *moved, python, "-c", JOIN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (str(bool(command)), "")

"""Where the compiled files of this build are: the BPF objects, and the launcher.

The one place that decides it, for the datapath, the installer and the lab. A wheel carries them inside the package; in
a checkout, where the package has none, they are where scripts/setup puts them. Both directories look the same inside.
"""

from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).resolve().parents[2]
IN_WHEEL: Final = _PACKAGE / "native"
IN_CHECKOUT: Final = _PACKAGE.parent / "build"
_DIRECTORY: Final = IN_WHEEL if IN_WHEEL.is_dir() else IN_CHECKOUT

OBJECT_DIRECTORY: Final = _DIRECTORY / "bpf"
"""`NAME.bpf.o` for each program source."""
LAUNCHER: Final = _DIRECTORY / "bin" / "podwire-cni"

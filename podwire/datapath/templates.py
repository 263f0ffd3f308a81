"""Templates: the compiled objects and the features they are loaded with, named by one hash.

Called by `datapath.programs`. Never touches the kernel. Invariant: two templates with one id hold the same bytes
and the same constants, so what was verified under an id once need not be verified again.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from podwire.datapath import abi
from podwire.model.errors import Unavailable

OBJECT_SUFFIX: Final = ".bpf.o"
ID_DIGITS: Final = 16


@dataclass(frozen=True)
class Template:
    """What is loaded into the kernel once per node. `objects`: file name without suffix -> ELF bytes."""

    objects: Mapping[str, bytes]
    constants: Mapping[str, int] = field(default_factory=dict)
    """Values of `const volatile` variables. In each object only those that it declares are set."""
    abi_version: int = abi.ABI_VERSION

    @functools.cached_property
    def id(self) -> str:
        """Name of the template: hash of layout version, objects and constants."""
        digest = hashlib.sha256(f"abi {self.abi_version}\n".encode())
        for name in sorted(self.objects):
            # With its length, so that no bytes can move from one object to the next under the same hash.
            digest.update(f"object {name} {len(self.objects[name])}\n".encode())
            digest.update(self.objects[name])
        for name in sorted(self.constants):
            digest.update(f"constant {name} {self.constants[name]}\n".encode())
        return digest.hexdigest()[:ID_DIGITS]


def read_template(
    directory: Path, names: Sequence[str], constants: Mapping[str, int] | None = None
) -> Template:
    """Read compiled objects from a directory; Unavailable names a missing one."""
    objects = {}
    for name in names:
        path = directory / f"{name}{OBJECT_SUFFIX}"
        try:
            objects[name] = path.read_bytes()
        except OSError as error:
            raise Unavailable(
                f"read BPF object {str(path)!r}: {error.strerror}",
                hint="compile the objects: scripts/setup",
            ) from error
    return Template(objects, constants or {})

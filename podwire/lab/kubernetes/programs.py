"""Where the Kubernetes programs are: one directory that has all that are asked for, of one version.

Looked for in $KUBEBUILDER_ASSETS, in PATH, and in the cache that scripts/kubernetes-programs fills. Programs of two
places are never mixed: a kubelet newer than its API server is a combination that Kubernetes does not support.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from podwire.model.errors import NotFound

VERSION: Final = "v1.36.3"
"""What scripts/kubernetes-programs builds; tests/cluster/tools/go.mod pins the same."""
API_SERVER: Final = ("kube-apiserver",)
CLUSTER: Final = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy", "kubectl"),
)
NEWER: Final = ("containerd", "containerd-shim-runc-v2", "etcd")
"""Of a later generation than the distribution's."""
ASSETS_VARIABLE: Final = "KUBEBUILDER_ASSETS"
_HINT: Final = "scripts/kubernetes-programs builds them once, in about six minutes"
_NEWER_HINT: Final = "scripts/kubernetes-programs --newer builds them once"


def cache_directory() -> Path:
    """Give the directory of the programs that scripts/kubernetes-programs builds."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "podwire" / "kubernetes" / VERSION


def find(names: Sequence[str]) -> Mapping[str, str]:
    """Give the path of each program, all of one place; NotFound says how to get them."""
    places = [os.environ.get(ASSETS_VARIABLE, ""), os.environ["PATH"], str(cache_directory())]
    for place in filter(None, places):
        paths = {name: shutil.which(name, path=place) for name in names}
        if all(paths.values()):
            return {name: str(path) for name, path in paths.items()}
    raise NotFound(
        f"find {', '.join(names)}: not in ${ASSETS_VARIABLE}, PATH or {str(cache_directory())!r}",
        hint=_HINT,
    )


def newer_directory() -> Path:
    """Give the directory of the newer programs that scripts/kubernetes-programs --newer builds."""
    return cache_directory().parent.parent / "newer"


def find_newer() -> Mapping[str, str]:
    """Give the path of each newer program; NotFound says how to get them."""
    directory = newer_directory()
    paths = {name: shutil.which(name, path=str(directory)) for name in NEWER}
    if missing := [name for name, path in paths.items() if path is None]:
        raise NotFound(f"find {', '.join(missing)}: not in {str(directory)!r}", hint=_NEWER_HINT)
    return {name: str(path) for name, path in paths.items()}


def find_containerd(*, newer: bool = False) -> str:
    """Give the path of containerd: the distribution's, or the newer one."""
    return find_newer()["containerd"] if newer else require("containerd", "containerd")


def find_etcd(*, newer: bool = False) -> str:
    """Give the path of etcd: the distribution's, or the newer one."""
    return find_newer()["etcd"] if newer else require("etcd", "etcd-server")


def require(name: str, package: str) -> str:
    """Give the path of a program of the distribution; NotFound names its package."""
    path = shutil.which(name)
    if path is None:
        raise NotFound(f"find {name}: not in PATH", hint=f"apt-get install {package}")
    return path

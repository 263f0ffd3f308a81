"""The settings of a containerd that runs beside others on a small machine: of the second version, which 2.x converts.

Used for the nodes of the cluster, and by tests that speak to a containerd alone.
"""

from typing import Final

import msgspec

from podwire.lab.kubernetes.nodes.images import PAUSE_IMAGE

_SETTINGS: Final = """
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.opt"]
[debug]
  level = "{log_level}"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  # There is no registry: the image is imported by this name.
  sandbox_image = "{pause}"
  # Without CAP_SYS_RESOURCE runc cannot lower a score, and dies.
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{networks}"
    max_conf_num = {networks_max}
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


class ContainerdSettings(msgspec.Struct, frozen=True):
    """Where a containerd has its files, and where it finds networks."""

    root: str
    state: str
    socket: str
    plugins: str
    """Directory of CNI plugins."""
    networks: str
    """Directory of network configurations."""
    networks_max: int = 1
    log_level: str = "info"
    """With `debug` it says when the network part of a sandbox begins and ends."""

    def write(self) -> str:
        """Write the configuration file's text."""
        return _SETTINGS.format(pause=PAUSE_IMAGE, **msgspec.structs.asdict(self))

"""Look at a machine without an agent: what the kernel can do, what the obstacles are, what of podwire is there.

For `podwire doctor` and `podwire cleanup`. Looking changes nothing. A finding says what is wrong and what to do next.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podwire.datapath import host
from podwire.datapath.device import list_devices
from podwire.datapath.inventory import name_native, remove_everything
from podwire.datapath.loading import OBJECTS
from podwire.datapath.masquerade import Masquerade
from podwire.datapath.native import OwnHooks, list_attached, list_free_hooks
from podwire.datapath.programs import list_versions
from podwire.datapath.routes import list_own_routes
from podwire.datapath.templates import read_template
from podwire.datapath.tunnel import list_tunnels
from podwire.kernel.clock import KernelClock
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.nft import Nftables
from podwire.kernel.probe import REQUIRED, Answer, Feature, Probe
from podwire.model.cluster import DEFAULT_TUNNEL_PORT
from podwire.model.errors import PodwireError
from podwire.model.ids import NFT_TABLE
from podwire.model.installation.shipped import OBJECT_DIRECTORY

__all__ = [
    "Finding",
    "read_hooks",
    "remove_everything",
    "restore_settings",
    "survey_host",
    "survey_kernel",
    "survey_leftovers",
]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `level` is `ok`, `warning` or `failure`."""

    check: str
    level: str
    message: str
    hint: str = ""


def survey_kernel() -> list[Finding]:
    """Probe the features of the running kernel; a missing one that is required is a failure."""
    probe = Probe()
    release = os.uname().release
    findings = []
    for feature in Feature:
        answer = probe.ask(feature)
        needed = feature in REQUIRED
        level = "ok" if answer is Answer.YES or not needed else "failure"
        if needed and answer is Answer.UNKNOWN:
            level = "warning"
        findings.append(
            Finding(
                f"kernel: {feature.value}",
                level,
                f"{answer.value} (kernel {release}{'' if needed else ', optional'})",
                "" if level == "ok" else "podwire needs a kernel from 6.1 on with this feature",
            )
        )
    return findings


def survey_host() -> list[Finding]:
    """Look for what breaks pods' traffic on this host, and for the files that a datapath needs."""
    findings = [_look_at_bpffs(), _look_at_programs()]
    with NetlinkSocket() as netlink, Nftables() as tables:
        for warning in host.find_warnings(netlink, tables, ipv4=True, ipv6=True):
            findings.append(Finding("host", "warning", warning.message, warning.hint))
        foreign = list_devices(netlink)[1]
        findings.extend(_look_at_tunnels(netlink))
    findings.extend(
        Finding(
            "host",
            "warning",
            f"device {name!r} has a name of podwire's form and no mark of podwire",
            "rename or remove it: an attachment that needs this name will be refused",
        )
        for name in foreign
    )
    return findings


def survey_leftovers(bpf_dir: Path, hooks: OwnHooks | None = None) -> Sequence[str]:
    """Name what `cleanup --all` would remove here. `hooks`: what the agent noted."""
    hooks = hooks or OwnHooks()
    with NetlinkSocket() as netlink, Nftables() as tables:
        owned = list_devices(netlink)[0]
        routes = list_own_routes(netlink)
        tunnels = [tunnel for tunnel in list_tunnels(netlink) if tunnel.node_name is not None]
        hooks.compare(netlink)
        attached, free = list_attached(netlink), list_free_hooks(netlink, hooks)
        has_table = bool(Masquerade(tables).compare())
    findings = [f"device {device.name} of endpoint {device.endpoint_id}" for device in owned]
    findings.extend(f"route to {route.destination}" for route in routes)
    findings.extend(f"tunnel device {tunnel.link.name}" for tunnel in tunnels)
    findings.extend(name_native(attached, free))
    if has_table:
        findings.append(f"nftables table {NFT_TABLE}")
    if bpf_dir.is_dir():
        findings.extend(f"pins {bpf_dir}/v{version}" for version in list_versions(bpf_dir))
    return findings


def read_hooks(noted: str) -> OwnHooks:
    """Read what an agent noted of devices that it gave hooks to; nothing of another boot."""
    return OwnHooks(noted, boot_id=KernelClock().boot_id())


def restore_settings(noted: str) -> list[str]:
    """Put back the settings of this host that an agent noted it had changed, unless somebody changed them since."""
    changes = host.read_changes(noted, KernelClock().boot_id())
    return [f"setting net.{'.'.join(change.path)}" for change in host.undo_host(changes)]


def _look_at_tunnels(netlink: NetlinkSocket) -> list[Finding]:
    """Name VXLAN devices of others that the tunnel would meet."""
    return [
        Finding(
            "tunnel",
            "warning",
            f"VXLAN device {tunnel.link.name!r} of somebody else is on UDP port {tunnel.settings.port}",
            f"remove it (ip link del {tunnel.link.name}), or choose another `tunnel_port` on every"
            " node; with native routing alone it does no harm",
        )
        for tunnel in list_tunnels(netlink)
        if tunnel.node_name is None and tunnel.settings.port == DEFAULT_TUNNEL_PORT
    ]


def _look_at_bpffs() -> Finding:
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    if any(line.split()[2] == "bpf" for line in mounts):
        return Finding("bpf file system", "ok", "mounted")
    return Finding(
        "bpf file system",
        "warning",
        "none is mounted",
        "the agent mounts one where it is allowed to; or: mount -t bpf bpf /sys/fs/bpf",
    )


def _look_at_programs() -> Finding:
    try:
        template = read_template(OBJECT_DIRECTORY, OBJECTS)
    except PodwireError as error:
        return Finding("programs", "failure", error.message, error.hint or "run scripts/setup")
    return Finding("programs", "ok", f"template {template.id[:12]}")

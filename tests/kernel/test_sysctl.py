"""Settings are those of the calling thread's namespace, and no name leads out of /proc/sys/net."""

import errno

import pytest

from podwire.kernel import netns
from podwire.kernel.clock import KernelClock
from podwire.kernel.sysctl import ensure_sysctl, read_sysctl, sysctl_exists, write_sysctl
from podwire.model.errors import InvalidConfiguration, KernelFailure
from tests.kernel.conftest import Namespace


def test_settings_are_those_of_the_visited_namespace(host: Namespace, pod: Namespace) -> None:
    write_sysctl("0", "ipv4", "ip_forward")
    with netns.namespace(pod.fd.fileno()):
        write_sysctl("1", "ipv4", "ip_forward")
    assert read_sysctl("ipv4", "ip_forward") == "0"
    assert pod.run("sysctl", "-n", "net.ipv4.ip_forward").strip() == "1"


def test_ensure_writes_only_what_differs_and_gives_the_old_value(host: Namespace) -> None:
    write_sysctl("0", "ipv4", "ip_forward")
    assert ensure_sysctl("1", "ipv4", "ip_forward") == "0"
    assert ensure_sysctl("1", "ipv4", "ip_forward") is None


@pytest.mark.parametrize("part", ["", ".", "..", "../ipv4", "a/b", "lo\0"])
def test_parts_that_lead_elsewhere_are_refused(part: str) -> None:
    for use in (
        lambda: read_sysctl("ipv4", "conf", part, "rp_filter"),
        lambda: write_sysctl("0", "ipv4", "conf", part, "rp_filter"),
        lambda: sysctl_exists("ipv4", "conf", part),
    ):
        with pytest.raises(InvalidConfiguration):
            use()


def test_missing_setting_and_bad_value_name_the_path(host: Namespace) -> None:
    with pytest.raises(KernelFailure) as missing:
        read_sysctl("ipv4", "conf", "nosuch0", "rp_filter")
    assert missing.value.errno == errno.ENOENT
    assert "nosuch0" in missing.value.message
    with pytest.raises(KernelFailure) as wrong:
        write_sysctl("many", "ipv4", "ip_forward")
    assert wrong.value.errno == errno.EINVAL
    assert not sysctl_exists("ipv4", "conf", "nosuch0")


def test_clock_counts_up_within_one_boot() -> None:
    clock = KernelClock()
    first = clock.boottime_ns()
    assert clock.boottime_ns() > first
    assert clock.boot_id() == KernelClock().boot_id()
    assert len(clock.boot_id()) == 36

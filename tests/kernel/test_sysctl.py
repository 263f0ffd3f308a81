"""Settings are those of the calling thread's namespace, and no name leads out of /proc/sys/net."""

import errno
import os
import subprocess
import sys

import pytest

from podwire.kernel import netns
from podwire.kernel.clock import FIRST_PID_NAMESPACE, KernelClock
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


def test_a_process_ran_from_its_start_to_its_end() -> None:
    clock = KernelClock()
    if os.readlink("/proc/self/ns/pid") != FIRST_PID_NAMESPACE:
        pytest.skip("the tests run in a process id namespace of their own")
    with subprocess.Popen(["sleep", "60"]) as process:
        started_ns = clock.boottime_ns()
        assert clock.process_ran_at(process.pid, started_ns)
        # Somebody else had the number before.
        assert clock.process_ran_at(process.pid, started_ns - 60_000_000_000) is False
        process.kill()
    assert clock.process_ran_at(process.pid, started_ns) is False


def test_nobody_tells_of_processes_that_a_namespace_hides() -> None:
    program = (
        "from podwire.kernel.clock import KernelClock; print(KernelClock().process_ran_at(1, 1))"
    )
    own = ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-c", program]
    assert subprocess.run(own, capture_output=True, check=True, text=True).stdout == "None\n"

"""Descriptors are owned, namespaces are entered by one thread and left again."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.model.errors import InvalidConfiguration, KernelFailure
from tests.kernel.conftest import Namespace, new_namespace


def _pipe_end() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def test_fd_closes_once_and_refuses_use_afterwards() -> None:
    fd = Fd(_pipe_end(), "pipe")
    number = fd.fileno()
    fd.close()
    fd.close()
    assert fd.closed
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    with pytest.raises(ValueError, match="after it was closed"):
        fd.fileno()


def test_fd_detached_is_the_callers_to_close() -> None:
    with Fd(_pipe_end(), "pipe") as fd:
        number = fd.detach()
    os.close(number)


def test_fd_dropped_open_warns_and_is_closed() -> None:
    fd = Fd(_pipe_end(), "pipe")
    number = fd.fileno()
    gc.collect()  # what others dropped is none of this test's warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del fd
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)


def test_named_namespace_is_seen_and_entered_by_iproute2() -> None:
    with new_namespace() as namespace:
        shown = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        assert namespace.name in shown
        assert [link["ifname"] for link in namespace.ip("link")] == ["lo"]
    shown = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert namespace.name not in shown
    assert not Path(netns.named_path(namespace.name)).exists()


def test_namespace_made_by_iproute2_opens_with_the_same_cookie(pod: Namespace) -> None:
    with netns.open_namespace(netns.named_path(pod.name)) as again:
        assert netns.cookie(again.fileno()) == netns.cookie(pod.fd.fileno())


def test_creating_a_name_twice_fails_and_keeps_the_first(pod: Namespace) -> None:
    with pytest.raises(KernelFailure) as caught:
        netns.create_named(pod.name)
    assert caught.value.errno == errno.EEXIST
    assert pod.ip("link")


def test_deleting_a_name_that_is_gone_is_success() -> None:
    netns.delete_named("pwt-never-there")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InvalidConfiguration):
        netns.create_named(name)


@pytest.mark.parametrize(
    ("path", "number"),
    [
        pytest.param("/run/netns/pwt-gone", errno.ENOENT, id="gone"),
        pytest.param("/proc/self/ns/uts", errno.EINVAL, id="another-kind"),
        pytest.param("/etc/hostname", errno.EINVAL, id="plain-file"),
    ],
)
def test_open_namespace_names_what_is_wrong(path: str, number: int) -> None:
    with pytest.raises(KernelFailure) as caught:
        netns.open_namespace(path)
    assert caught.value.errno == number
    assert path in caught.value.message


def test_visit_changes_one_thread_and_ends(pod: Namespace) -> None:
    def current() -> int:
        return os.stat("/proc/thread-self/ns/net").st_ino

    home = current()
    elsewhere: list[int] = []
    with netns.namespace(pod.fd.fileno()):
        assert current() == pod.pod.cookie
        thread = threading.Thread(target=lambda: elsewhere.append(_main_thread_namespace()))
        thread.start()
        thread.join()
    assert current() == home


def _main_thread_namespace() -> int:
    return os.stat(f"/proc/{os.getpid()}/ns/net").st_ino


def test_visit_ends_also_when_the_body_fails(pod: Namespace) -> None:
    home = os.stat("/proc/thread-self/ns/net").st_ino
    with pytest.raises(RuntimeError), netns.namespace(pod.fd.fileno()):
        raise RuntimeError
    assert os.stat("/proc/thread-self/ns/net").st_ino == home


def test_run_in_gives_results_and_errors_of_its_thread(pod: Namespace) -> None:
    inside = netns.run_in(pod.fd.fileno(), lambda: os.stat("/proc/thread-self/ns/net").st_ino)
    assert inside == pod.pod.cookie
    with pytest.raises(ZeroDivisionError):
        netns.run_in(pod.fd.fileno(), lambda: 1 // 0)


def test_entering_what_is_no_namespace_fails() -> None:
    with Fd(_pipe_end(), "pipe") as fd, pytest.raises(KernelFailure) as caught:
        netns.run_in(fd.fileno(), lambda: None)
    assert caught.value.errno == errno.EINVAL


def test_a_visitor_that_cannot_return_ends_the_process(pod: Namespace) -> None:
    """Whatever it did afterwards would hit the wrong machine."""
    script = f"""
from podwire.kernel import netns
from podwire.model.errors import KernelFailure
with netns.namespace({pod.fd.fileno()}):
    def refuse(fd, kind):
        raise KernelFailure(1, "setns", str(fd))
    netns.set_namespace = refuse
print("went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        pass_fds=[pod.fd.fileno()],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, b"")

"""The harness itself, with a reference plugin in podwire's place: what fails here is not podwire's fault."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.containerd import Containerd
from tests.runtime.machine import Machine
from tests.runtime.podman import Podman


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine() as made:
        plugin: dict[str, Any] = {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "dataDir": str(made.directory / "host-local"),
                "ranges": [[{"subnet": "10.98.0.0/24"}]],
            },
        }
        document = {"cniVersion": "0.4.0", "name": "reference", "plugins": [plugin]}
        made.write_configuration(document, "05-reference.conflist")
        yield made


def test_containerd_runs_a_pod_of_the_reference_plugin(machine: Machine) -> None:
    with Containerd(machine) as containerd:
        containerd.wait_network_ready()
        sandbox = containerd.run_pod("a")
        assert sandbox.addresses[0].startswith("10.98.0.")
        container = containerd.run_container(sandbox, "main", "/bin/sleep", "9999")
        assert sandbox.addresses[0] in containerd.execute(container, "/bin/ip", "addr")
        containerd.stop_pod(sandbox)
        containerd.remove_pod(sandbox)


def test_podman_runs_a_container_of_the_reference_plugin(machine: Machine) -> None:
    with Podman(machine) as podman:
        podman.start_container("a", networks=["reference"])
        networks = podman.inspect("a")["NetworkSettings"]["Networks"]
        address = networks["reference"]["IPAddress"]
        assert address.startswith("10.98.0.")
        assert address in podman.run("exec", "a", "/bin/ip", "addr")

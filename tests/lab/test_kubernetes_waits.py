"""A real agent and a real API server of which something is wrong: when it serves after that, and clocks that differ."""

import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.lab import labs
from podwire.lab import node as lab_nodes
from podwire.lab.kubernetes import programs
from podwire.lab.kubernetes.api_server import write_kubeconfig
from podwire.lab.kubernetes.nodes import bare
from podwire.lab.kubernetes.nodes.bare import AGENT
from podwire.lab.state import changed_state
from podwire.model.errors import NotFound
from podwire.model.wire import ALIVE_FILE
from tests.contract.clock_proxy import showing_another_time
from tests.lab.labrig import lab_name
from tests.lab.test_kubernetes_nodes import KubernetesLab
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

NODE: Final = "node1"
CORE_NODE: Final = f"/api/v1/nodes/{NODE}"
SERVES_S: Final = 1.0
"""So soon after what kept it from serving is over; on a machine that is busy, sooner than it could be started."""
PATIENCE_S: Final = 400.0
"""One attempt must be in time: during the others the machine may have stood still."""

ENDS_S: Final = 3.0
"""So soon an agent ends whose API server does not answer; in one of some tries, as the machine may stand still."""
ENDS_TRIES: Final = 10
ENDS_AT_ONCE_S: Final = 1.0
"""An agent that ends sooner waited for no answer, and shows nothing."""
ENDS_AFTER_S: Final = 0.2
"""By then its request waits for an answer."""


@pytest.fixture(scope="module")
def lab() -> Iterator[KubernetesLab]:
    """One node, the agent of which was never started."""
    try:
        programs.find(programs.API_SERVER)
        programs.require("etcd", "etcd-server")
    except NotFound as missing:
        pytest.skip(f"{missing.message} ({missing.hint})")
    with bare.raised(lab_name(), start=False) as cluster:
        yield KubernetesLab(cluster)


def start_first(lab: KubernetesLab) -> int:
    """Start the agent as on a machine that knows nothing yet; gives where its log begins."""
    node = lab.node()
    labs.change_agent(lab.name, NODE, "kill")
    shutil.rmtree(node.directory / "state", ignore_errors=True)
    (node.directory / ALIVE_FILE).unlink(missing_ok=True)
    begin = len(lab_nodes.read_log(node))
    with changed_state(lab.name) as state:
        lab_nodes.start_agent(state, node, wait=False)
    return begin


def says(lab: KubernetesLab, begin: int, text: str) -> bool:
    return text in "\n".join(lab_nodes.read_log(lab.node())[begin:])


Cure = Callable[[], float]
"""Ends a cause; gives when it was over, or sooner."""


def at_once(end: Callable[[], object]) -> Cure:
    """Make a cure of what takes no time, unless the machine stands still."""

    def cure() -> float:
        now_s = time.monotonic()
        end()
        return now_s

    return cure


def lack_a_range(lab: KubernetesLab) -> Cure:
    client = lab.cluster.client
    core = client.get(CORE_NODE)
    client.delete(CORE_NODE)
    client.create(CORE_NODE.rpartition("/")[0], {"metadata": {"name": NODE}, "spec": {}})
    addresses = {"status": {"addresses": core["status"]["addresses"]}}
    client.patch(f"{CORE_NODE}/status", addresses)
    spec = {name: core["spec"][name] for name in ("podCIDR", "podCIDRs")}
    return at_once(partial(client.patch, CORE_NODE, {"spec": spec}))


def hang(lab: KubernetesLab) -> Cure:
    lab.cluster.api.freeze()
    return at_once(lab.cluster.api.thaw)


def refuse_connections(lab: KubernetesLab) -> Cure:
    api = lab.cluster.api
    api.kill()

    def cure() -> float:
        api.start()
        return time.monotonic()

    return cure


def be_out_of_reach(lab: KubernetesLab) -> Cure:
    labs.set_partition(lab.name, NODE, "store")
    return at_once(partial(labs.heal, lab.name))


@pytest.mark.parametrize(
    ("begin_cause", "said"),
    [
        pytest.param(lack_a_range, "its core Node has no podCIDR", id="no podCIDR"),
        pytest.param(hang, "no answer", id="an API server that hangs"),
        pytest.param(refuse_connections, "Connection refused", id="none that accepts"),
        pytest.param(be_out_of_reach, "no answer", id="none that can be reached"),
    ],
)
def test_an_agent_that_waits_serves_within_a_second_of_the_end(
    lab: KubernetesLab,
    begin_cause: Callable[[KubernetesLab], Cure],
    said: str,
    record_property: Any,
) -> None:
    taken_s: list[float] = []
    until_s = time.monotonic() + PATIENCE_S
    while not taken_s or is_late(lab, taken_s[-1]):
        assert time.monotonic() < until_s, taken_s
        end_cause = begin_cause(lab)
        try:
            begin = start_first(lab)
            wait_for(lambda begin=begin: says(lab, begin, said), f"{said!r} in the log")  # type: ignore[misc]
            assert not lab.cni("STATUS").ok
        finally:
            ended_s = end_cause()
        taken_s.append(wait_until_it_serves(lab) - ended_s)
    record_property("taken_s", taken_s)
    print("from the end of the cause to STATUS, s:", *(f"{wait_s:.3f}" for wait_s in taken_s))


def wait_until_it_serves(lab: KubernetesLab) -> float:
    """Give when it does."""
    wait_for(lambda: lab.cni("STATUS").ok, "STATUS to succeed")
    return time.monotonic()


def is_late(lab: KubernetesLab, taken_s: float) -> bool:
    return taken_s >= SERVES_S and taken_s >= measure_start(lab)


def measure_start(lab: KubernetesLab) -> float:
    """Give how long a whole start takes now, of which nothing is wrong."""
    begin_s = time.monotonic()
    start_first(lab)
    return wait_until_it_serves(lab) - begin_s


@pytest.mark.parametrize(
    ("by", "said"),
    [
        pytest.param(timedelta(hours=2), "more than an hour behind the API server's", id="behind"),
        pytest.param(timedelta(minutes=-9), "more than 5 minutes ahead of the API", id="ahead"),
    ],
)
def test_a_clock_that_differs_is_named_in_status_log_and_an_event(
    lab: KubernetesLab, tmp_path: Path, by: timedelta, said: str
) -> None:
    api = lab.cluster.api
    with showing_another_time(api, by) as url:
        token = {"token": api.users[AGENT].token}
        restart(
            lab, kubeconfig=write_kubeconfig(tmp_path / "kubeconfig", url, api.ca, AGENT, token)
        )
        (told,) = wait_for(
            lambda: [warning for warning in lab.get("/status")["warnings"] if said in warning],
            "the warning",
        )
        assert "have both follow a time server" in told
        wait_for(lambda: told in "\n".join(lab_nodes.read_log(lab.node())), "the log")
        wait_for(lambda: any(told in event for event in lab.events("PodwireWarning")), "the Event")
    restart(lab)
    assert not lab.warns("the clock of this host")


def restart(lab: KubernetesLab, **settings: object) -> None:
    labs.change_agent(lab.name, NODE, "stop")
    lab.cluster.write_config(lab.node(), {name: str(value) for name, value in settings.items()})
    labs.change_agent(lab.name, NODE, "start")


def find_published(lab: KubernetesLab) -> object:
    """Give what the node says of its pods."""
    return lab.objects("nodeendpoints").get(NODE, {}).get("spec")


def test_an_agent_ends_soon_while_the_api_server_does_not_answer(
    lab: KubernetesLab, record_property: Any
) -> None:
    taken_s: list[float] = []
    for number in range(ENDS_TRIES):
        restart(lab)
        pod = f"ends{number}"
        before = find_published(lab)
        lab.run(pod, NODE)
        wait_for(lambda before=before: find_published(lab) != before, "its publication")  # type: ignore[misc]
        lab.cluster.api.freeze()
        try:
            labs.remove(lab.name, pod)  # which is to be published, and cannot be
            time.sleep(ENDS_AFTER_S)
            began_s = time.monotonic()
            labs.change_agent(lab.name, NODE, "stop")
            taken_s.append(time.monotonic() - began_s)
        finally:
            lab.cluster.api.thaw()
        if ENDS_AT_ONCE_S < taken_s[-1] < ENDS_S:
            break
    labs.change_agent(lab.name, NODE, "start")
    record_property("taken_s", taken_s)
    print("from SIGTERM to the end, s:", *(f"{wait_s:.3f}" for wait_s in taken_s))
    waited_s = [wait_s for wait_s in taken_s if wait_s > ENDS_AT_ONCE_S]
    assert not waited_s or min(waited_s) < ENDS_S, taken_s

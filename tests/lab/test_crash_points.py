"""kill -9 at every side effect of ADD, of DEL and of a start: afterwards nothing is leaked, nothing is given twice.

The agent of `tests.lab.crash_agent` dies at the n-th point, n = 1, 2, ... until the operation gets through: so every
point is visited, also ones that a later version adds. The next agent starts on what is left of the one before.
"""

import re
import shutil
from collections.abc import Iterator

import pytest

from tests.lab.agent_forks import AgentForks
from tests.lab.rig import Outcome, Rig, run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
WRITTEN_BEHIND = "/endpoints/"
TRIES_MAX = 8
POINTS_MAX = 500
QUIET_LOOKS = 100
KEPT, VICTIM = "kept", "victim"
ADD_WAISTS = ("journal write", "netlink", "map update", "os.rename", "nft", "route_localnet")
DEL_WAISTS = ("journal write", "netlink", "map delete", "journal remove", "os.rmdir", "nft")


def asking_for(host_port: int) -> dict[str, object]:
    """Give the configuration of a pod that asks for a port of the host."""
    return {"runtimeConfig": {"portMappings": [{"hostPort": host_port, "containerPort": 80}]}}


CONFIG = {KEPT: asking_for(8081), VICTIM: asking_for(8080)}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with AgentForks() as forks, Rig() as made:
        made.forks = forks
        yield made


def keep_a_pod(rig: Rig) -> str:
    """Make the pod that no crash of another one's operation may touch; gives its namespace."""
    rig.start()
    namespace = rig.make_pod_namespace()
    outcome = rig.cni("ADD", KEPT, namespace, config=CONFIG[KEPT])
    assert outcome.ok, outcome.document
    rig.stop()
    return namespace


def containers(rig: Rig) -> set[str]:
    """Check that everything agrees, and tell who is there."""
    records = rig.assert_consistent().records.values()
    return {record["key"]["container_id"] for record in records}


def has_interface(namespace: str) -> bool:
    return "eth0" in run("ip", "-n", namespace, "-br", "link", "show")


def assert_reachable(namespace: str) -> None:
    run("ip", "netns", "exec", namespace, "ping", "-c1", "-w60", "169.254.1.1")


def provoke(rig: Rig, command: str, namespace: str) -> Outcome:
    """Call the launcher; wait until its request is answered and done, or has killed the agent."""
    rig.arm()
    outcome = rig.cni(command, VICTIM, namespace, config=CONFIG[VICTIM])
    wait_until_over(rig)
    rig.arm(False)
    return outcome


def wait_until_over(rig: Rig) -> None:
    """Wait until all is done, also what goes on in the background, or the agent is dead.

    Done means: nothing is on its way out, and no point was passed during as many looks as make
    more than a second: the machine may stand still for a while.
    """
    looks = [-1] * QUIET_LOOKS

    def over() -> bool:
        try:
            states = rig.get("/status")[1]["endpoints"]["byState"]
        except (OSError, ValueError, IndexError):
            return not rig.is_running()
        looks.append(rig.count_points())
        return "disconnecting" not in states and len(set(looks[-QUIET_LOOKS:])) == 1

    wait_for(over, "the operation to end or to kill the agent", 60)


def shown(points: list[str]) -> set[str]:
    """Give points without their numbers, and without those that another thread passes whenever it comes to it."""
    return {re.sub(r"[0-9]+", "N", point) for point in points if WRITTEN_BEHIND not in point}


def assert_all_visited(visited: list[str], points: list[str], waists: tuple[str, ...]) -> None:
    """Every point of the run that got through killed one before; a waist that is never met counts nothing any more.

    Which of the directories' effects a number hits differs from run to run: another thread makes them meanwhile.
    """
    print(f"{len(visited)} points:", *visited, sep="\n  ")
    assert shown(points) <= shown(visited)
    for waist in waists:
        assert any(waist in point for point in visited), waist


def test_add_dies_at_every_point(rig: Rig) -> None:
    kept = keep_a_pod(rig)
    namespace = rig.make_pod_namespace()
    visited: list[str] = []
    answered = False
    while True:
        rig.start(crash_at=len(visited) + 1, crash_command="ADD")
        rig.settle()
        # Dead after the commit and before the answer: the pod is there, and the runtime's DEL ends it.
        assert containers(rig) in ([{KEPT, VICTIM}] if answered else [{KEPT}, {KEPT, VICTIM}])
        deleted = rig.cni("DEL", VICTIM, namespace)
        assert deleted.ok, deleted.document
        rig.settle()
        assert containers(rig) == {KEPT}
        assert not has_interface(namespace)
        assert_reachable(kept)
        added = provoke(rig, "ADD", namespace)
        points = rig.crash_points()
        if rig.is_running():
            break
        answered = added.ok  # what is written for people may follow the answer
        assert answered or added.document["code"] == 11
        visited.append(points[-1])
        assert len(visited) < POINTS_MAX
    assert added.ok, added.document
    assert_all_visited(visited, points, ADD_WAISTS)


def test_a_fold_of_the_journal_dies_at_every_point(rig: Rig) -> None:
    """It follows an ADD's answer, so that the pod lives on whatever becomes of it."""
    kept = keep_a_pod(rig)
    namespace = rig.make_pod_namespace()
    visited: list[str] = []
    while True:
        rig.start(crash_at=len(visited) + 1, crash_command="FOLD")
        rig.settle()
        wait_for(rig.is_folded, "the journal of the start to be folded", 60)
        rig.arm()
        added = rig.cni("ADD", VICTIM, namespace)
        assert added.ok, added.document
        wait_for(lambda: rig.is_folded() or not rig.is_running(), "the fold", 60)
        wait_until_over(rig)
        rig.arm(False)
        points = rig.crash_points()
        if rig.is_running():
            break
        visited.append(points[-1])
        rig.start()
        assert containers(rig) == {KEPT, VICTIM}
        assert_reachable(namespace)
        deleted = rig.cni("DEL", VICTIM, namespace)
        assert deleted.ok, deleted.document
        rig.settle()
        assert containers(rig) == {KEPT}
        assert_reachable(kept)
        rig.stop()
        assert len(visited) < POINTS_MAX
    assert_all_visited(visited, points, ("journal fold", "os.truncate"))


def test_del_dies_at_every_point(rig: Rig) -> None:
    kept = keep_a_pod(rig)
    namespace = rig.make_pod_namespace()
    visited: list[str] = []
    crash_at, tries = 1, 0
    while True:
        rig.start(crash_at=crash_at, crash_command="DEL")
        rig.settle()
        assert containers(rig) == {KEPT}
        assert not has_interface(namespace)
        assert_reachable(kept)
        added = rig.cni("ADD", VICTIM, namespace, config=CONFIG[VICTIM])
        assert added.ok, added.document
        assert containers(rig) == {KEPT, VICTIM}
        deleted = provoke(rig, "DEL", namespace)
        assert deleted.ok, deleted.document
        points = rig.crash_points()
        # What the reaper does comes earlier or later from run to run, so a point of its may move on behind the number
        # of the run: runs go on until one that gets through has no point that killed none.
        if rig.is_running() and (shown(points) <= shown(visited) or tries > TRIES_MAX):
            break
        if rig.is_running():
            tries += 1
            rig.stop()
            crash_at = next(
                number
                for number, point in enumerate(points, 1)
                if not shown([point]) <= shown(visited)
            )
            continue
        visited.append(points[-1])
        crash_at = len(visited) + 1
        assert len(visited) < POINTS_MAX
    assert containers(rig) == {KEPT}
    assert_all_visited(visited, points, DEL_WAISTS)


def leave_a_mess(rig: Rig, namespaces: tuple[str, str]) -> None:
    """Kill an agent in the middle of an ADD, and write a DEL into the spool while it is away."""
    torn, doomed = namespaces
    rig.start(crash_at=12, crash_command="ADD")
    rig.settle()
    assert rig.cni("DEL", VICTIM, torn).ok
    assert rig.cni("ADD", "doomed", doomed).ok
    rig.settle()
    provoke(rig, "ADD", torn)
    assert not rig.is_running(), "the ADD has fewer points than that"
    rig.crash_points()
    assert rig.cni("DEL", "doomed", doomed).ok
    assert rig.spooled()


def test_a_start_over_a_mess_dies_at_every_point(rig: Rig, full: bool) -> None:
    """Short runs visit each fifth point; --full visits all."""
    kept = keep_a_pod(rig)
    namespaces = (rig.make_pod_namespace(), rig.make_pod_namespace())
    at, visited = 1, []
    while True:
        leave_a_mess(rig, namespaces)
        rig.start(crash_at=at, crash_command="START", wait=False)
        wait_until_over(rig)
        if rig.is_running():
            rig.settle()
            assert containers(rig) == {KEPT}
            break
        visited.append(rig.crash_points()[-1])
        rig.start()
        rig.settle()
        assert containers(rig) == {KEPT}
        assert not any(map(has_interface, namespaces))
        assert_reachable(kept)
        rig.stop()
        at += 1 if full else 5
        assert at < POINTS_MAX
    # A short run strides over points; which waists it meets depends on where the strides fall.
    assert_all_visited(visited, [], ("journal write", "netlink", "map") if full else ())


def test_a_first_start_dies_at_every_point(rig: Rig, full: bool) -> None:
    """Programs are loaded and pinned, maps are made, the journal is laid out. Short runs visit each eighth point."""
    at, visited = 1, []
    namespace = rig.make_pod_namespace()
    while True:
        shutil.rmtree(rig.bpf, ignore_errors=True)
        shutil.rmtree(rig.directory / "state", ignore_errors=True)
        rig.start(crash_at=at, crash_command="START", wait=False)
        wait_until_over(rig)
        if rig.is_running():
            break
        visited.append(rig.crash_points()[-1])
        rig.start()
        assert containers(rig) == set()
        assert rig.cni("ADD", VICTIM, namespace, config=CONFIG[VICTIM]).ok
        assert rig.cni("DEL", VICTIM, namespace).ok
        rig.settle()
        assert containers(rig) == set()
        rig.stop()
        at += 1 if full else 8
        assert at < POINTS_MAX
    assert_all_visited(visited, [], ("pin", "map update") if full else ())

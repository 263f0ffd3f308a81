"""Random lives of a node: ADD, DEL, CHECK, GC, bursts, kill -9, restarts, in an order that a seed decides.

A model knows which attachments must be there. After every restart, and now and then, kernel, maps, directories, journal
and API are compared with it by `Rig.assert_consistent`. 300 steps, 10,000 with `--full`; the seed is printed.
"""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.lab.agent_forks import AgentForks
from tests.lab.rig import Outcome, Rig

pytestmark = [pytest.mark.lab, pytest.mark.timeout(6 * 3600)]
STEPS, STEPS_FULL = 300, 10_000
CONTAINERS = 12
COMPARE_EVERY = 25
TRY_AGAIN = 11


@dataclass
class World:
    """The node and what must be true of it."""

    rig: Rig
    random: random.Random
    namespaces: dict[str, str] = field(default_factory=dict)
    alive: dict[str, set[str]] = field(default_factory=dict)
    """Container -> addresses that its ADD answered."""
    results: dict[str, Outcome] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    down: bool = False

    def note(self, text: str) -> None:
        self.history.append(text)

    def pick(self, *, alive: bool) -> str | None:
        names = [name for name in self.namespaces if (name in self.alive) is alive]
        return self.random.choice(names) if names else None

    def begin(self, command: str, name: str) -> "subprocess.Popen[bytes]":
        self.note(f"{command} {name}")
        return self.rig.start_cni(command, name, self.namespaces[name])

    def finish(self, command: str, name: str, process: "subprocess.Popen[bytes]") -> None:
        """Take an answer into the model. An ADD that was cut off is followed by a DEL, as every runtime does."""
        outcome = self.rig.finish_cni(process)
        if command == "DEL":
            assert outcome.ok, outcome.document
            self.alive.pop(name, None)
            return
        if outcome.ok:
            self.take(name, outcome)
            return
        assert outcome.document["code"] == TRY_AGAIN, outcome.document
        self.ensure_up()
        deleted = self.rig.cni("DEL", name, self.namespaces[name])
        assert deleted.ok, deleted.document

    def take(self, name: str, outcome: Outcome) -> None:
        addresses = set(outcome.addresses)
        assert len(addresses) == 2
        for other, held in self.alive.items():
            assert not addresses & held, f"{name} got an address that {other} has"
        self.alive[name] = addresses
        self.results[name] = outcome

    def ensure_up(self) -> None:
        if not self.rig.is_running():
            self.rig.start()

    def compare(self) -> None:
        self.ensure_up()
        self.rig.settle()
        present = self.rig.assert_consistent()
        found = {
            record["key"]["container_id"]: {record["ipv4"], record["ipv6"]}
            for record in present.records.values()
        }
        assert found == self.alive


def add(world: World) -> None:
    if (name := world.pick(alive=False)) is not None:
        world.finish("ADD", name, world.begin("ADD", name))


def add_twice(world: World) -> None:
    if (name := world.pick(alive=True)) is not None:
        again = world.rig.cni("ADD", name, world.namespaces[name])
        assert (again.ok, again.document["code"]) == (False, 7), again.document


def delete(world: World) -> None:
    if (name := world.pick(alive=True)) is not None:
        world.finish("DEL", name, world.begin("DEL", name))


def delete_absent(world: World) -> None:
    if (name := world.pick(alive=False)) is not None:
        world.finish("DEL", name, world.begin("DEL", name))


def check(world: World) -> None:
    if (name := world.pick(alive=True)) is not None:
        config = {"prevResult": world.results[name].document}
        outcome = world.rig.cni("CHECK", name, world.namespaces[name], config=config)
        assert outcome.ok, outcome.document


def collect(world: World) -> None:
    """GC with one living attachment left out of the list."""
    lost = world.pick(alive=True)
    valid = [{"containerID": name, "ifname": "eth0"} for name in world.alive if name != lost]
    outcome = world.rig.cni("GC", config={"cni.dev/valid-attachments": valid})
    assert outcome.ok, outcome.document
    if lost is not None:
        world.note(f"GC without {lost}")
        del world.alive[lost]


def vanish(world: World) -> None:
    """The runtime removes the namespace first and calls DEL afterwards, with an empty CNI_NETNS."""
    if (name := world.pick(alive=True)) is not None:
        world.rig.remove_namespace(world.namespaces[name])
        outcome = world.rig.cni("DEL", name)
        assert outcome.ok, outcome.document
        del world.alive[name]
        world.namespaces[name] = world.rig.make_pod_namespace()


def burst(world: World) -> None:
    run_burst(world, kill=False)


def burst_and_kill(world: World) -> None:
    run_burst(world, kill=True)


def run_burst(world: World, *, kill: bool) -> None:
    """Several launchers at once; the agent may be killed at any moment of it."""
    names = world.random.sample(sorted(world.namespaces), world.random.randint(2, 6))
    commands = {name: "DEL" if name in world.alive else "ADD" for name in names}
    processes = {name: world.begin(command, name) for name, command in commands.items()}
    if kill:
        # Not waiting for anything: a random moment is what this is about.
        time.sleep(world.random.uniform(0, 0.02))
        world.rig.kill()
        world.note("kill -9")
        world.rig.start()
    # An ADD of the burst may have got what a DEL of it gave back: the model hears of the DELs first.
    for name in sorted(processes, key=lambda name: commands[name] != "DEL"):
        world.finish(commands[name], name, processes[name])


def kill(world: World) -> None:
    world.rig.kill()
    world.compare()


def restart(world: World) -> None:
    assert world.rig.stop() == 0
    world.compare()


def delete_while_away(world: World) -> None:
    """DELs, one of them twice, and an ADD of a name that was deleted a moment ago, all while no agent is there."""
    world.rig.kill()
    for _ in range(world.random.randint(1, 3)):
        delete(world)
    delete_absent(world)
    name = world.pick(alive=False)
    waiting = world.begin("ADD", name) if name is not None else None
    world.rig.start()
    if waiting is not None and name is not None:
        world.finish("ADD", name, waiting)
    world.compare()


def die_at_a_point(world: World) -> None:
    """A crash agent takes over and dies somewhere in the next ADD or DEL."""
    world.rig.stop()
    command = world.random.choice(["ADD", "DEL"])
    at = world.random.randint(1, 30)
    world.note(f"die at point {at} of {command}")
    world.rig.arm()
    world.rig.start(crash_at=at, crash_command=command)
    (add if command == "ADD" else delete)(world)
    world.rig.arm(False)
    world.rig.kill()
    world.rig.crash_points()
    world.compare()


Step = Callable[[World], None]
WEIGHTS: dict[Step, int] = {
    add: 30,
    delete: 22,
    add_twice: 2,
    delete_absent: 3,
    check: 6,
    collect: 2,
    vanish: 4,
    burst: 14,
    burst_and_kill: 5,
    kill: 3,
    restart: 2,
    delete_while_away: 3,
    die_at_a_point: 4,
}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with AgentForks() as forks, Rig() as made:
        made.forks = forks
        yield made


def test_random_lives_end_clean(rig: Rig, full: bool, seed: int) -> None:
    rig.start()
    world = World(rig, random.Random(seed))
    for number in range(CONTAINERS):
        world.namespaces[f"c{number}"] = rig.make_pod_namespace()
    steps = STEPS_FULL if full else STEPS
    try:
        for number in range(steps):
            [step] = world.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
            world.note(f"step {number}: {step.__name__}")
            step(world)
            if number % COMPARE_EVERY == 0:
                world.compare()
        for name in list(world.namespaces):
            world.finish("DEL", name, world.begin("DEL", name))
        world.compare()
    except BaseException:
        print(f"seed {seed}; the last of what was done:", *world.history[-30:], sep="\n  ")
        print(rig.log_tail(40))
        raise
    assert not rig.look().records

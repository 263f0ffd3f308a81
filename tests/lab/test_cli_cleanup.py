"""`podwire cleanup --all` on a node of its own: refused while its agent runs, afterwards nothing of ours is left.

The command would also remove every lab of the machine. It runs where it sees none: with empty directories mounted
over those that labs use, in a mount namespace of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.lab.rig import Rig, run

pytestmark = pytest.mark.lab

PODWIRE = Path(sys.executable).parent / "podwire"
HIDDEN = ("/run/podwire", "/run/netns", "/sys/fs/bpf/podwire")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def cleanup(
    rig: Rig, *options: str, variables: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command in the node's network namespace, out of sight of labs; by default with the agent's own file."""
    hide = "".join(f"if [ -d {path} ]; then mount -t tmpfs none {path}; fi; " for path in HIDDEN)
    if variables is None:
        options = ("--config", str(rig.directory / "agent.toml"), *options)
    return subprocess.run(
        [
            *("nsenter", f"--net=/run/netns/{rig.name}", "unshare", "--mount"),
            *("sh", "-ec", f'{hide} exec "$@"', "sh"),
            *(str(PODWIRE), "cleanup", "--all", "-o", "json", *options),
        ],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def marks(rig: Rig) -> dict[str, object]:
    """List all that carries a mark of ours."""
    links = json.loads(run("ip", "-n", rig.name, "-j", "link", "show"))
    in_node = ("nsenter", f"--net=/run/netns/{rig.name}")
    return {
        "devices": [link["ifname"] for link in links if link["ifname"].startswith("pw")],
        "routes": [
            run("ip", "-n", rig.name, family, "route", "show", "proto", "199").split()
            for family in ("-4", "-6")
        ],
        "tables": "podwire" in run(*in_node, "nft", "list", "tables"),
        "pins": sorted(str(path) for path in rig.bpf.rglob("*") if path.is_file()),
        "files": sorted(
            path.name
            for path in (*rig.directory.iterdir(), *(rig.directory / "state").iterdir())
            if path.name.startswith(OURS) and not path.name.endswith(SIDE_FILES)
        ),
    }


OURS = ("journal.db", "remembered.db", "cni.sock", "api.sock", "alive", "spool", "endpoints")
SIDE_FILES = ("-shm", "-wal")
"""They come and go with whoever looks into a database."""
NOTHING = {"devices": [], "routes": [[], []], "tables": False, "pins": [], "files": []}


LABS = """
import sys
from podwire.cli.main import main
from podwire.lab import labs

labs.list_leftovers = lambda running_too=False: ["running"]
labs.down = lambda name, progress: print(f"{name} is down", file=sys.stderr)
sys.argv[0] = "podwire"
sys.exit(main())
"""
"""The command, with a lab that is up."""


def test_a_cleanup_that_is_refused_takes_no_lab_down(rig: Rig) -> None:
    rig.start()
    config = ("--config", str(rig.directory / "agent.toml"))
    command = (sys.executable, "-c", LABS, "cleanup", "--all", *config, "--yes")

    def try_it() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["nsenter", f"--net=/run/netns/{rig.name}", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    refused = try_it()
    assert refused.returncode == 5, refused
    assert "is down" not in refused.stderr
    assert "nothing was removed" in refused.stderr
    rig.kill()
    done = try_it()
    assert done.returncode == 0, done
    assert "running is down" in done.stderr


def test_cleanup_removes_all_that_carries_our_marks_and_only_that(rig: Rig) -> None:
    run("ip", "-n", rig.name, "link", "add", "other", "type", "bridge")
    rig.start()
    for container in ("one", "two"):
        assert rig.cni("ADD", container, rig.make_pod_namespace()).ok
    before = marks(rig)
    assert all(before.values())

    refused = cleanup(rig, "--yes")
    assert refused.returncode == 5, refused
    assert "agent" in refused.stderr
    assert marks(rig) == before

    rig.kill()
    dry = cleanup(rig)
    assert dry.returncode == 2, dry
    promised = json.loads(dry.stdout)["removed"]
    kinds = sorted(removal.split()[0] for removal in promised if not removal.startswith("/"))
    # Each pod has a route in both families, and so has the node's block.
    assert kinds == [*["device"] * 2, "nftables", "pins", *["route"] * 6]
    files = [Path(removal).name for removal in promised if removal.startswith("/")]
    assert sorted(file for file in files if not file.endswith(SIDE_FILES)) == before["files"]
    assert marks(rig) == before

    done = cleanup(rig, "--yes")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["done"] is True
    assert marks(rig) == NOTHING
    assert "other" in run("ip", "-n", rig.name, "link", "show")

    again = cleanup(rig, "--yes")
    assert (again.returncode, json.loads(again.stdout)["removed"]) == (0, [])


def say_by_flags(rig: Rig) -> tuple[list[str], dict[str, str]]:
    said = {"--state-dir": rig.directory / "state", "--run-dir": rig.directory}
    return [*(f"{flag}={path}" for flag, path in said.items()), "--bpf-dir", str(rig.bpf)], {}


def say_by_environment(rig: Rig) -> tuple[list[str], dict[str, str]]:
    return [], {
        "PODWIRE_STATE_DIR": str(rig.directory / "state"),
        "PODWIRE_RUN_DIR": str(rig.directory),
        "PODWIRE_BPF_DIR": str(rig.bpf),
    }


def name_the_file(rig: Rig) -> tuple[list[str], dict[str, str]]:
    return [], {"PODWIRE_CONFIG": str(rig.directory / "agent.toml")}


@pytest.mark.parametrize("say", [say_by_flags, say_by_environment, name_the_file])
def test_where_the_agent_keeps_its_things_is_said_as_to_the_agent(
    rig: Rig, say: Callable[[Rig], tuple[list[str], dict[str, str]]]
) -> None:
    rig.start()
    rig.kill()
    assert marks(rig)["files"]
    options, variables = say(rig)
    done = cleanup(rig, "--yes", *options, variables=variables)
    assert done.returncode == 0, done
    assert marks(rig) == NOTHING


@pytest.mark.parametrize("dead", [False, True], ids=["agent runs", "agent is dead"])
def test_wrong_settings_are_refused_and_remove_nothing(rig: Rig, dead: bool) -> None:
    rig.start()
    if dead:
        rig.kill()
    before = marks(rig)
    for options in (["--yess"], ["--yes", "--mtu=7"], ["--yes", "--config", "/nowhere"]):
        refused = cleanup(rig, *options)
        assert refused.returncode in (2, 6), refused
        assert refused.stderr.count("\n") == 2
    assert marks(rig) == before


def test_a_running_agent_with_other_directories_is_seen_by_the_name_of_its_node(rig: Rig) -> None:
    rig.start()
    before = marks(rig)
    refused = cleanup(rig, "--yes", f"--node-name={rig.name}", variables={})
    assert refused.returncode == 5, refused
    assert marks(rig) == before


def test_an_agent_starts_anew_after_a_cleanup(rig: Rig) -> None:
    rig.start()
    namespace = rig.make_pod_namespace()
    assert rig.cni("ADD", "one", namespace).ok
    rig.stop()
    assert cleanup(rig, "--yes").returncode == 0
    rig.start()
    assert rig.cni("ADD", "one", namespace).ok
    rig.assert_consistent()

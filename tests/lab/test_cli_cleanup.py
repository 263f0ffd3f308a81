"""`podwire cleanup --all` on a node of its own: refused while its agent runs, afterwards nothing of ours is left.

The command would also remove every lab of the machine. It runs where it sees none: with empty directories mounted
over those that labs use, in a mount namespace of its own.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
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


def cleanup(rig: Rig, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in the node's network namespace, out of sight of labs."""
    hide = "".join(f"if [ -d {path} ]; then mount -t tmpfs none {path}; fi; " for path in HIDDEN)
    state, pins = f"--state-dir={rig.directory / 'state'}", f"--bpf-dir={rig.bpf}"
    return subprocess.run(
        [
            *("nsenter", f"--net=/run/netns/{rig.name}", "unshare", "--mount"),
            *("sh", "-ec", f'{hide} exec "$@"', "sh"),
            *(str(PODWIRE), "cleanup", "--all", state, pins, "-o", "json", *options),
        ],
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
        "journal": (rig.directory / "state" / "journal.db").exists(),
    }


NOTHING = {"devices": [], "routes": [[], []], "tables": False, "pins": [], "journal": False}


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
    promised = sorted(one.split()[0] for one in json.loads(dry.stdout)["removed"])
    # Each pod has a route in both families, and so has the node's block.
    assert promised == [*["device"] * 2, "nftables", "pins", *["route"] * 6]
    assert marks(rig) == before

    done = cleanup(rig, "--yes")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["done"] is True
    assert marks(rig) == NOTHING
    assert "other" in run("ip", "-n", rig.name, "link", "show")

    again = cleanup(rig, "--yes")
    assert (again.returncode, json.loads(again.stdout)["removed"]) == (0, [])


def test_an_agent_starts_anew_after_a_cleanup(rig: Rig) -> None:
    rig.start()
    namespace = rig.make_pod_namespace()
    assert rig.cni("ADD", "one", namespace).ok
    rig.stop()
    assert cleanup(rig, "--yes").returncode == 0
    rig.start()
    assert rig.cni("ADD", "one", namespace).ok
    rig.assert_consistent()

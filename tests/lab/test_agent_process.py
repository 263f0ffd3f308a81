"""The agent as a process: starting, refusing to start, reloading, stopping, and what it does when a disk is full."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.datapath import abi
from podwire.kernel import bpf
from tests.lab.rig import AGENT, ROOT, Rig, run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def start_failing(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run an agent that must not get far; exit code and what it says."""
    done = subprocess.run(
        [sys.executable, *AGENT, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.returncode, done.stdout + done.stderr


def test_the_api_answers_as_soon_as_launchers_are_answered(rig: Rig) -> None:
    def connects(name: str) -> bool:
        with socket.socket(socket.AF_UNIX) as tried:
            return tried.connect_ex(str(rig.directory / name)) == 0

    rig.start(wait=False)
    wait_for(lambda: connects("cni.sock"), "the launchers' socket", 120)
    assert connects("api.sock")
    status, ready = rig.get("/healthz")
    assert (status, ready["ready"]) == (200, True)


def test_help_and_version_need_nothing() -> None:
    assert start_failing("--help")[0] == 0
    status, text = start_failing("--version")
    assert (status, bool(re.fullmatch(r"podwire-agent \S+\n", text))) == (0, True)


def test_wrong_settings_are_all_named_and_nothing_is_touched(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'mtu = 7\nbogus = 1\nstate_dir = "{tmp_path}/state"\n')
    status, text = start_failing("--config", str(config), "--tunnel-prot", "1")
    assert status == 2
    for part in ("mtu = 7", "unknown key 'bogus'", "did you mean '--tunnel-port'?", "hint: "):
        assert part in text
    assert "Traceback" not in text
    assert os.listdir(tmp_path) == ["agent.toml"]


def test_a_named_file_that_is_absent_is_refused(tmp_path: Path) -> None:
    status, text = start_failing("--config", str(tmp_path / "none.toml"))
    assert (status, "none.toml" in text) == (2, True)


def test_whoever_is_not_root_is_refused() -> None:
    # Nobody else may be able to read the checkout: the modules are there before the user changes.
    program = (
        "import os, sys; from podwire.agent.main import main; os.setuid(65534); sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, "not root's" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("shared", ["state_dir", "run_dir", "bpf_dir"])
def test_a_second_agent_on_one_directory_is_refused(rig: Rig, tmp_path: Path, shared: str) -> None:
    rig.start()
    assert rig.agent is not None
    mine = {
        "state_dir": (f"{rig.directory}/state", f"pid {rig.agent.pid}"),
        "run_dir": (str(rig.directory), f"pid {rig.agent.pid}"),
        "bpf_dir": (str(rig.bpf), "another agent holds them"),
    }
    other = {
        "node_cidrs": ["10.98.0.0/24"],
        "state_dir": str(tmp_path / "state"),
        "run_dir": str(tmp_path / "run"),
        "bpf_dir": f"{rig.bpf}-other",
    }
    other[shared], words = mine[shared]
    config = tmp_path / "agent.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in other.items()))
    status, text = start_failing("--config", str(config))
    assert status == 5
    assert words in text
    assert rig.get("/healthz")[0] == 200


def test_both_sockets_are_for_root_alone(rig: Rig) -> None:
    rig.start()
    for name in ("cni.sock", "api.sock"):
        status = os.stat(rig.directory / name)
        assert stat.S_ISSOCK(status.st_mode)
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, 0)


def test_a_stop_is_clean_and_leaves_the_pods(rig: Rig) -> None:
    rig.start()
    namespace = rig.make_pod_namespace()
    assert rig.cni("ADD", "c1", namespace).ok
    before = rig.assert_consistent()
    assert rig.stop() == 0
    assert not (rig.directory / "cni.sock").exists()
    assert not (rig.directory / "api.sock").exists()
    after = rig.look()
    assert (after.devices, after.rows, after.addresses) == (
        before.devices,
        before.rows,
        before.addresses,
    )
    run("ip", "netns", "exec", namespace, "ping", "-c1", "-w60", "169.254.1.1")


def test_a_running_agent_reads_its_file_again(rig: Rig) -> None:
    rig.start()
    assert rig.agent is not None
    config = rig.directory / "agent.toml"
    text = config.read_text()
    config.write_text(text + 'log_level = "debug"\nmtu = 1400\nmasquerade = false\n')
    rig.agent.send_signal(1)

    def settings() -> dict[str, object]:
        shown = rig.get("/config")[1]["settings"]
        return {key: shown[key]["value"] for key in ("log_level", "mtu", "masquerade")}

    wanted = {"log_level": "debug", "mtu": 0, "masquerade": False}
    wait_for(lambda: settings() == wanted, "the settings to be read", 120)
    wait_for(lambda: "changed settings need a restart" in rig.log_tail(), "the warning", 120)
    config.write_text("nonsense = \n")
    rig.agent.send_signal(1)
    wait_for(lambda: "reload settings failed" in rig.log_tail(), "the refusal", 120)
    assert settings() == wanted


def masquerades(rig: Rig) -> bool:
    return "masquerade" in run("ip", "netns", "exec", rig.name, "nft", "list", "ruleset")


def test_masquerade_is_switched_while_the_agent_runs(rig: Rig) -> None:
    rig.start()
    for value in (True, False, True):
        body = json.dumps({"masquerade": value}).encode()
        assert rig.ask("PATCH", "/config", body)[0] == 200
        wait_for(lambda value=value: masquerades(rig) is value, f"masquerade to be {value}", 120)  # type: ignore[misc]


def test_metrics_are_served_on_a_tcp_address() -> None:
    with Rig(metrics_listen="127.0.0.1:9469") as rig:
        rig.start()
        fetch = (
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9469/metrics').read())"
        )
        text = run("nsenter", f"--net=/run/netns/{rig.name}", sys.executable, "-c", fetch)
        assert "podwire_ready 1.0" in text


def test_status_succeeds_without_the_agent_only_within_the_grace() -> None:
    with Rig(status_grace_s=600) as rig:
        rig.start()
        assert rig.cni("STATUS").ok
        rig.kill()
        assert rig.cni("STATUS").ok
    with Rig() as rig:
        rig.start()
        rig.kill()
        outcome = rig.cni("STATUS")
        assert (outcome.ok, outcome.document["code"]) == (False, 50)


def test_an_exhausted_range_is_told_by_add_status_and_metrics() -> None:
    with Rig(cidrs=("10.99.0.2/31",)) as rig:
        rig.start()
        first = rig.cni("ADD", "c1", rig.make_pod_namespace())
        assert first.addresses == ["10.99.0.2"]
        second = rig.cni("ADD", "c2", rig.make_pod_namespace())
        assert second.document["code"] == 100
        assert rig.cni("STATUS").document["code"] == 50
        assert 'state="free"} 0.0' in rig.get("/metrics")[1].decode()
        rig.assert_consistent()
        assert rig.cni("DEL", "c1").ok
        rig.settle()
        wait_for(lambda: rig.cni("STATUS").ok, "an address to be free", 120)


def test_a_spoofed_packet_is_seen_as_a_flow(rig: Rig) -> None:
    rig.start()
    namespace = rig.make_pod_namespace()
    assert rig.cni("ADD", "c1", namespace).ok
    run("ip", "-n", namespace, "addr", "add", "203.0.113.9/32", "dev", "eth0")
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, "ping", "-c1", "-W1", "-I", "203.0.113.9", "192.0.2.1"],
        capture_output=True,
        check=False,
    )
    assert done.returncode

    def dropped() -> bool:
        lines = rig.get("/flows?verdict=dropped&pod=c1")[1].decode().splitlines()
        flows = [json.loads(line) for line in lines if line.startswith("{")]
        return any(
            flow["reason"] == "source-address" and flow["from"]["ip"] == "203.0.113.9"
            for flow in flows
        )

    wait_for(dropped, "the flow", 120)
    assert 'podwire_drops_total{hook="from_pod",reason="source-address"}' in (
        rig.get("/metrics")[1].decode()
    )


def test_what_the_memory_of_flows_had_no_room_for_is_a_metric(rig: Rig) -> None:
    rig.start()
    assert rig.cni("ADD", "c1", rig.make_pod_namespace()).ok
    [path] = rig.bpf.glob("v*/maps/pw_usage")
    usage = bpf.open_any_pinned_map(str(path))
    assert usage is not None
    with usage:
        [(key, raw)] = usage.items()
        row = abi.UsageValue.unpack(raw)._replace(
            connections=(3, 4), unremembered=(5, 6), unprotected=(7, 8)
        )
        usage.update(key, row.pack())
    text = rig.get("/metrics")[1].decode()
    for name, values in (
        ("podwire_connections", row.connections),
        ("podwire_flows_unremembered_total", row.unremembered),
        ("podwire_connections_unprotected_total", row.unprotected),
    ):
        for direction, value in zip(("egress", "ingress"), values, strict=True):
            labels = f'direction="{direction}",endpoint="{int.from_bytes(key, "little")}"'
            assert f"{name}{{{labels}}} {value}.0" in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path))
    yield tmp_path
    run("umount", "-l", str(tmp_path))


def fill(directory: Path) -> Path:
    """Take every byte that is left."""
    path = directory / "ballast"
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


def test_a_full_disk_fails_add_and_not_del(small_disk: Path) -> None:
    with Rig(state_dir=str(small_disk / "state")) as rig:
        rig.start()
        kept, refused = rig.make_pod_namespace(), rig.make_pod_namespace()
        assert rig.cni("ADD", "c1", kept).ok
        ballast = fill(small_disk)
        outcome = rig.cni("ADD", "c2", refused)
        while outcome.ok:  # the journal's file had room left over
            assert rig.cni("DEL", "c2", refused).ok
            outcome = rig.cni("ADD", "c2", refused)
        assert outcome.document["code"] == 5
        assert "free space" in outcome.document["details"]
        wait_for(lambda: rig.get("/healthz")[0] == 503, "the agent to be told unhealthy", 120)
        assert rig.cni("DEL", "c1", kept).ok
        assert "eth0" not in run("ip", "-n", refused, "-br", "link")
        ballast.unlink()
        rig.settle()
        assert rig.cni("ADD", "c2", refused).ok
        wait_for(lambda: rig.get("/healthz")[0] == 200, "the agent to be healthy again", 120)
        assert len(rig.look().devices) == 1


def test_idle_connections_do_not_keep_a_stop_waiting(rig: Rig) -> None:
    rig.start()
    with socket.socket(socket.AF_UNIX) as idle, socket.socket(socket.AF_UNIX) as silent:
        idle.connect(str(rig.directory / "api.sock"))
        silent.connect(str(rig.directory / "cni.sock"))
        assert rig.stop() == 0

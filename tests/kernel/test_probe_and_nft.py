"""Features are tried out; nftables commands are whole or nothing."""

import errno
import subprocess
from collections.abc import Iterator

import pytest

from podwire.kernel import nft, probe
from podwire.kernel.nft import Nftables
from podwire.kernel.probe import Answer, Feature, Probe
from podwire.model.errors import KernelFailure, Unsupported
from tests.kernel.conftest import Namespace


@pytest.mark.parametrize("feature", probe.REQUIRED, ids=lambda feature: feature.name)
def test_this_kernel_has_what_the_datapath_needs(feature: Feature) -> None:
    assert Probe().ask(feature) is Answer.YES


def test_optional_device_kinds_agree_with_iproute2(host: Namespace) -> None:
    for feature, kind in (
        (Feature.NETKIT, ["netkit"]),
        (Feature.VXLAN, ["vxlan", "id", "7", "dstport", "8472", "dev", "lo"]),
    ):
        tried = subprocess.run(
            ["ip", "link", "add", "pwtry", "type", *kind], capture_output=True, check=False
        )
        has = b"Unknown device type" not in tried.stderr
        assert Probe().ask(feature) is (Answer.YES if has else Answer.NO)


def test_missing_feature_is_no_and_a_missing_required_one_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unknown device kind and an unknown helper stand for what an older kernel lacks."""
    changed = dict(probe._PROBES)
    changed[Feature.VETH] = lambda: probe._probe_kind("pwnosuch")
    changed[Feature.BPF_TIMER] = lambda: probe._probe_helper(4000)
    monkeypatch.setattr(probe, "_PROBES", changed)
    asked = Probe()
    assert asked.ask(Feature.BPF_TIMER) is Answer.NO
    assert asked.ask(Feature.VETH) is Answer.NO


def test_only_definite_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Answer.UNKNOWN, None, Answer.YES, Answer.NO])

    def answer() -> Answer:
        given = next(answers)
        if given is None:
            raise OSError(errno.EMFILE, "full")
        return given

    monkeypatch.setattr(probe, "_PROBES", {Feature.TCX: answer})
    asked = Probe()
    assert [asked.ask(Feature.TCX) for _ in range(4)] == [
        Answer.UNKNOWN,
        Answer.UNKNOWN,
        Answer.YES,
        Answer.YES,
    ]


def test_probing_leaves_nothing_in_this_namespace(host: Namespace) -> None:
    before = host.ip("link")
    asked = Probe()
    for feature in Feature:
        asked.ask(feature)
    assert host.ip("link") == before
    assert host.run("nft", "list", "tables") == ""


def test_a_failure_is_explained_only_by_a_feature_that_is_certainly_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = KernelFailure(errno.EOPNOTSUPP, "create device pair", "pw1")
    assert probe.explain_failure(failure, Feature.VETH) is failure
    changed = {Feature.VETH: lambda: probe._probe_kind("pwnosuch")}
    monkeypatch.setattr(probe, "_PROBES", changed)
    explained = probe.explain_failure(failure, Feature.VETH)
    assert isinstance(explained, Unsupported)
    assert "has no veth device pairs" in explained.message


@pytest.fixture(params=[True, False], ids=["library", "command"])
def tables(request: pytest.FixtureRequest, host: Namespace) -> Iterator[Nftables]:
    """nftables by both ways."""
    with Nftables(in_process=request.param) as opened:
        assert opened.in_process is request.param
        yield opened


def test_commands_are_applied_and_listed(host: Namespace, tables: Nftables) -> None:
    tables.run("add table inet pwtest\nadd chain inet pwtest one")
    listed = tables.list_json("list table inet pwtest")
    assert [next(iter(item)) for item in listed] == ["table", "chain"]
    assert "table inet pwtest" in host.run("nft", "list", "tables")


def test_a_failing_transaction_changes_nothing(host: Namespace, tables: Nftables) -> None:
    with pytest.raises(KernelFailure) as caught:
        tables.run("add table inet pwtest\nadd rule inet pwtest nochain accept")
    assert caught.value.errno == errno.ENOENT
    assert "No such file" in caught.value.message
    assert host.run("nft", "list", "tables") == ""


def test_nonsense_is_refused_with_what_nftables_says(tables: Nftables) -> None:
    with pytest.raises(KernelFailure, match="syntax error"):
        tables.run("make me a table")


def test_the_context_goes_on_after_an_error(tables: Nftables) -> None:
    for _ in range(3):
        with pytest.raises(KernelFailure):
            tables.run("delete table inet pwnever")
        tables.run("add table inet pwtest")
    assert len(tables.list_json("list tables")) == 1


def test_use_after_close_is_a_mistake_of_ours(host: Namespace) -> None:
    tables = Nftables()
    tables.close()
    tables.close()
    with pytest.raises(ValueError, match="closed"):
        tables.run("list tables")


def test_without_library_and_command_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nft, "_COMMAND", "pwt-no-such-command")
    monkeypatch.setattr(nft, "_LIBRARY", "libpwt-no-such.so")
    with Nftables() as tables, pytest.raises(Unsupported, match="nftables") as caught:
        tables.run("list tables")
    assert "install" in caught.value.hint

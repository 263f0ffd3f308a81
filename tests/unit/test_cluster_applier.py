"""What the applier asks of a kernel that refuses a plan, and when: the clock is moved by hand, no thread runs."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from podwire.agent.duties.cluster.applier import Applier
from podwire.control.cluster.facts import node_key
from podwire.model.errors import ForeignObject, KernelFailure
from tests.unit.test_cluster_duty import Rig
from tests.unit.test_cluster_planner import UNDERLAY, make


class Hand:
    """An applier whose steps and clock are moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.rig = Rig()
        self.kernel = self.rig.kernel
        self.passes = 0
        self.failing = False
        self.rows_failing = False
        self._apply, self._change = self.kernel.apply_cluster, self.kernel.change_prefixes
        self.kernel.apply_cluster = self.apply  # type: ignore[method-assign]
        self.kernel.change_prefixes = self.change  # type: ignore[method-assign]
        duty = self.rig.duty
        self.applier = Applier(
            duty, self.kernel, duty.turn, self.rig.metrics, now=lambda: self.now_s
        )
        duty._applier = self.applier
        self.rig.publish_peer(make(2))
        duty.prepare()

    def apply(self, plan: Any) -> Any:
        self.passes += 1
        if self.failing:
            raise ForeignObject("add route to 10.244.2.0/24", hint="remove: ip route del it")
        return self._apply(plan)

    def change(self, put: Any, remove: Any = ()) -> None:
        if self.rows_failing:
            raise KernelFailure(12, "update map", "pw_ipcache")
        self._change(put, remove)

    def do(self, what: str) -> None:
        """Let one thing happen, and the step that it wakes."""
        getattr(self, f"_{what}", lambda: None)()
        self.rig.duty.prepare()
        self.applier.step(is_reconciliation=what in ("look", "moved"))

    def _fail(self) -> None:
        self.failing = True
        self._peer()

    def _fixed(self) -> None:
        self.failing = False

    def _peer(self) -> None:
        number = 3 + len(self.rig.duty.state.facts)
        self.rig.publish_peer(make(number))

    def _gone(self) -> None:
        self.rig.store.delete(node_key("n2"))

    def _same(self) -> None:
        """Let a node say something that no plan depends on."""
        self.rig.publish_peer(make(2, epoch=1 + self.rig.duty.state.facts["n2"].epoch))

    def _pod(self) -> None:
        sequence = 1 + len(self.kernel.changed)
        self.rig.publish_pods("n2", sequence, {f"10.244.2.{9 + sequence}": 300})

    def _borrowed(self) -> None:
        """Let a node have a pod outside of its ranges, which takes a route."""
        self.rig.publish_pods("n2", 1, {"10.250.0.5": 300})

    def _moved(self) -> None:
        self.kernel.underlay = msgspec.structs.replace(UNDERLAY, mtu_bytes=1400)

    @property
    def warnings(self) -> list[str]:
        return [warning for warning in self.rig.health.warnings() if warning.startswith("cluster:")]


@pytest.fixture
def hand() -> Hand:
    """Give an applier whose first plan is in force."""
    made = Hand()
    made.do("start")
    assert (made.passes, made.warnings) == (1, [])
    return made


def passes_at(hand: Hand, seconds: Iterable[tuple[float, str]]) -> list[float]:
    """Let things happen at times after the begin; gives when a whole pass was made."""
    found, begin_s = [], hand.now_s
    for at_s, what in seconds:
        before, hand.now_s = hand.passes, begin_s + at_s
        hand.do(what)
        found += [at_s] * (hand.passes - before)
    return found


def every(step_s: float, until_s: float, what: str) -> list[tuple[float, str]]:
    return [(number * step_s, what) for number in range(1, int(until_s / step_s))]


FAIL = (0.0, "fail")


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        pytest.param([FAIL, *every(0.25, 130, "news")], [0, 1, 3, 7, 15, 31, 61, 91, 121],
                     id="news without a change wait 1, 2, 4 ... 30 s"),
        pytest.param([FAIL, *every(0.25, 16, "look")], [0, 1, 3, 7, 15],
                     id="what the kernel tells does not hasten it"),
        pytest.param([FAIL, *every(0.25, 16, "pod")], [0, 1, 3, 7, 15],
                     id="nor do pods, whose rows need no pass"),
        pytest.param([FAIL, (0.25, "same"), (0.5, "same"), (1, "same")], [0, 1],
                     id="nor what changes nothing in the plan"),
        pytest.param([FAIL, (0.25, "peer"), (0.5, "news"), (0.75, "peer")], [0, 0.25, 0.75],
                     id="each new peer comes at once"),
        pytest.param([FAIL, (0.25, "gone"), (0.5, "news")], [0, 0.25], id="one that goes too"),
        pytest.param([FAIL, (0.25, "moved"), (0.5, "look")], [0, 0.25],
                     id="so does another MTU of this node"),
        pytest.param([FAIL, (0.25, "borrowed"), (0.5, "news")], [0, 0.25],
                     id="and a pod that takes a route"),
        pytest.param([FAIL, (1, "news"), (3, "news"), (4, "peer"), (4.5, "news"), (5, "news")],
                     [0, 1, 3, 4, 5], id="another plan waits from 1 s on again"),
        pytest.param([FAIL, (1, "news"), (3, "fixed"), (7, "fixed"), (8, "fail"), (9, "news")],
                     [0, 1, 3, 8, 9], id="success forgets"),
    ],
)  # fmt: skip
def test_when_a_plan_that_was_refused_is_tried_again(
    hand: Hand, seconds: Any, wanted: list[float]
) -> None:
    assert passes_at(hand, seconds) == wanted


def test_pods_are_reached_while_a_pass_waits(hand: Hand) -> None:
    passes_at(hand, [FAIL, (0.1, "pod"), (0.2, "pod")])
    assert [len(put) for put, _ in hand.kernel.changed] == [1, 1]
    assert hand.warnings, "rows are not all"


def test_a_new_peer_is_in_force_though_the_plan_before_it_failed(hand: Hand) -> None:
    passes_at(hand, [FAIL, (1, "news"), (3, "news")])
    hand.failing = False
    hand.do("peer")
    assert len(hand.rig.peers()) == 3
    assert hand.warnings == []


def test_a_failure_is_shown_with_what_to_do_until_a_whole_pass_has_succeeded(hand: Hand) -> None:
    passes_at(hand, [FAIL, (0.5, "fixed")])
    assert hand.warnings == [
        "cluster: add route to 10.244.2.0/24; remove: ip route del it; tried again within 30 s"
    ]
    passes_at(hand, [(0.5, "news")])
    assert hand.warnings == []


def test_rows_that_fail_bring_a_whole_pass_a_second_later(hand: Hand) -> None:
    hand.rows_failing = True
    assert passes_at(hand, [(0, "pod"), (0.5, "news"), (1, "news")]) == [1]
    assert hand.warnings == []


def test_rows_that_fail_while_a_pass_waits_do_not_postpone_it(hand: Hand) -> None:
    hand.rows_failing = True
    assert passes_at(hand, [FAIL, *every(0.25, 8, "pod")]) == [0, 1, 3, 7]


def test_a_look_that_fails_is_made_again_with_the_next_news(hand: Hand) -> None:
    read = hand.kernel.read_underlay

    def fail() -> Any:
        raise KernelFailure(105, "dump links", "")

    hand.kernel.read_underlay = fail  # type: ignore[method-assign]
    assert passes_at(hand, [(0, "look"), (0.1, "news")]) == []
    assert "dump links" in hand.warnings[0]
    hand.kernel.read_underlay = read  # type: ignore[method-assign]
    assert passes_at(hand, [(0.2, "moved")]) == [0.2]
    assert hand.warnings == []


def test_whatever_else_goes_wrong_points_at_the_log(
    hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:

    def blunder(plan: Any) -> Any:
        raise KeyError(plan)

    hand.kernel.apply_cluster = blunder  # type: ignore[method-assign]
    hand.do("peer")
    assert "see the agent's log" in hand.warnings[0]
    assert "KeyError" in caplog.text

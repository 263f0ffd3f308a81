"""How tests are handed out when workers die (tests/spread.py)."""

from types import SimpleNamespace
from typing import Any

import pytest
from xdist.scheduler import loadscope

from tests.spread import Spreading

TESTS = [f"tests/kernel/test_{file}.py::test_{number}" for file in range(6) for number in range(3)]


class FakeWorker:
    """Takes tests, and runs none."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def test_of_two_workers_that_are_replaced_at_a_time_one_may_be_ready_before_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loadscope, "parse_tx_spec_config", lambda _config: ["popen", "popen"])
    config: Any = SimpleNamespace(option=SimpleNamespace(loadscopereorder=False))
    spreading = Spreading(config)
    dying, replacing = [[FakeWorker(f"{kind}{n}") for n in range(2)] for kind in "dr"]
    for workers in (dying, replacing):
        for worker in workers:
            spreading.add_node(worker)
        for worker in workers:
            spreading.add_node_collection(worker, TESTS)
            if spreading.collection_is_completed:
                spreading.schedule()
        if workers is dying:
            died = [spreading.remove_node(worker) for worker in workers]
    assert died == [TESTS[0], TESTS[3]]
    assert [worker.given for worker in replacing] == [TESTS[4:6], TESTS[1:3]]

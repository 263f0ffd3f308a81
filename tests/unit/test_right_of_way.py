"""Work that nobody waits for stops while a request is carried out, and never for ever."""

import threading
import time

import pytest

from podwire.model import right_of_way
from podwire.model.right_of_way import RightOfWay
from tests.waiting import wait_for


def test_work_stops_while_a_request_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right_of_way, "WAIT_S", 3600.0)
    way, done = RightOfWay(), list[int]()
    reached, go_on = threading.Event(), threading.Event()

    def items() -> list[int]:
        return list(range(10))

    def work() -> None:
        for item in way.pace(items()):
            done.append(item)
            if item == 4:
                reached.set()
                assert go_on.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(60)
    with way:
        go_on.set()
        # Nothing tells that somebody waits but that nothing happens: a fault shows as a sixth item now and then.
        time.sleep(0.05)
        assert done == [0, 1, 2, 3, 4]
    thread.join(60)
    assert done == items()


def test_work_goes_on_beside_requests_without_a_pause() -> None:
    way = RightOfWay()
    done: list[int] = []
    with way:
        thread = threading.Thread(target=lambda: done.extend(way.pace(range(3))))
        thread.start()
        wait_for(lambda: done == [0, 1, 2])
    thread.join(60)

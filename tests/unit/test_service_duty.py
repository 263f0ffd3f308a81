"""What `podwire status` says of services: one trouble does not hide another one."""

import threading
from collections.abc import Iterable
from typing import cast

import pytest

from podwire.agent.duties.cluster.services import RETRY_S, ServiceDuty
from podwire.agent.duties.follower import KindList
from podwire.control.services.catalogue import KINDS, Catalogue
from podwire.control.services.choose import Place
from podwire.control.services.room import Room
from podwire.model.errors import Exhausted, Unavailable
from podwire.model.interfaces import NO_AFFINITY, Affinity, Frontend, ServiceTable
from podwire.model.store import Store
from tests.unit.service_objects import service, stored


class Table:
    """Maps that may refuse to be written."""

    def __init__(self) -> None:
        self.is_broken = True
        self.written: ServiceTable = {}

    def write(self, wanted: ServiceTable, affinity: Affinity = NO_AFFINITY) -> int:
        """Write all of it, or fail."""
        if self.is_broken:
            raise Exhausted("write services: no memory")
        self.written = wanted
        return len(wanted)

    def change(
        self, put: ServiceTable, gone: Iterable[Frontend], affinity: Affinity = NO_AFFINITY
    ) -> int:
        """Write what differs."""
        table = {**self.written, **put}
        for frontend in gone:
            table.pop(frontend, None)
        return self.write(table, affinity)


def test_a_store_that_comes_back_does_not_hide_a_change_that_failed() -> None:
    told: list[str] = []
    table = Table()
    duty = ServiceDuty(
        store=cast(Store, None),
        catalogue=Catalogue(Place("n1"), room=Room(4, 10)),
        datapath=table,
        turn=threading.RLock(),
        report=told.append,
        observe=lambda *_: None,
    )
    objects = [
        stored(service(name, [f"10.96.0.{number}"]), f"2026-01-0{number}")
        for number, name in enumerate(("a", "b", "c"), 1)
    ]
    duty.on_lists([KindList(KINDS[0], objects, 1), KindList(KINDS[1], [], 1)])
    with pytest.raises(Exhausted) as failure:
        duty._round()
    assert duty._failed(failure.value) == RETRY_S
    assert "no memory" in told[-1]
    duty.on_away(Unavailable("the store is away"))
    assert "the store is away" in told[-1]
    duty.on_back()
    assert "no memory" in told[-1]
    assert "away" not in told[-1]
    table.is_broken = False
    duty._round()
    assert "no room for services default/c " in told[-1]
    assert "no memory" not in told[-1]
    assert {str(one.address) for one in table.written} == {"10.96.0.1", "10.96.0.2"}

"""The own core Node's ranges come into force while the agent runs, and nothing is given out that may be another's."""

import threading
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from podwire.agent.duties.address_source import OwnCoreNode
from podwire.agent.duties.kubernetes.ranges import UID_FACT, WARNING, RangeKeeper, ServedRanges
from podwire.agent.duties.kubernetes.start import RANGES_FACT
from podwire.control.ipam.interface import Wish
from podwire.control.ipam.node import NodeIpam
from podwire.control.kubernetes.core_node import core_node_key
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import (
    AddressUnavailable,
    InvalidConfiguration,
    KernelFailure,
    Unavailable,
)
from podwire.model.ids import EndpointId
from podwire.model.store import StoredObject
from tests.fakes.store import MemoryStore
from tests.waiting import wait_for

OLD, NEW = "10.244.1.0/24", "10.244.7.0/24"


def networks(*texts: str) -> tuple[IPNetwork, ...]:
    return tuple(map(ip_network, texts))


# Addresses


NO_WISH = Wish()


def take(ipam: NodeIpam, owner: int, wish: Wish = NO_WISH) -> str:
    return str(ipam.take(EndpointId(owner), wish)[0])


def test_pods_keep_their_addresses_and_new_ones_get_some_of_the_new_range() -> None:
    ipam = NodeIpam([OLD])
    first = take(ipam, 1)
    ipam.change_ranges(networks(NEW))
    assert ip_address(take(ipam, 2)) in ip_network(NEW)
    assert list(map(str, ipam.list_strays())) == [first]
    assert ipam.find_owner(ip_address(first)) == 1
    with pytest.raises(AddressUnavailable):
        ipam.take(EndpointId(3), Wish(wanted=(ip_address("10.244.1.77"),)))
    ipam.release(EndpointId(1))
    assert not ipam.list_strays()


def test_a_range_that_comes_back_knows_who_still_has_an_address_of_it() -> None:
    ipam = NodeIpam([OLD])
    there = {take(ipam, number) for number in range(1, 4)}
    ipam.change_ranges(networks(NEW))
    ipam.change_ranges(networks(OLD))
    assert not ipam.list_strays()
    usage = ipam.usage()[0]
    assert (usage.held, str(usage.node_address)) == (3, "10.244.1.1")
    everything = {take(ipam, number) for number in range(4, 4 + usage.free)}
    assert len(everything) == usage.free
    assert not everything & there


def test_a_range_that_stays_keeps_how_its_addresses_rest() -> None:
    ipam = NodeIpam([OLD])
    first = take(ipam, 1)
    ipam.release(EndpointId(1))
    ipam.change_ranges(networks(OLD, "fd00:1::/64"))
    assert take(ipam, 2) != first  # the address that ended last comes last again
    assert ipam.families == [4, 6]


def test_ranges_that_cannot_be_used_change_nothing() -> None:
    ipam = NodeIpam([OLD])
    with pytest.raises(InvalidConfiguration):
        ipam.change_ranges(networks("10.244.9.1/32"))
    assert ip_address(take(ipam, 1)) in ip_network(OLD)


def test_nothing_is_given_while_something_is_in_the_way() -> None:
    ipam = NodeIpam([OLD])
    ipam.withhold("contest", "node n2 has it")
    ipam.withhold("core Node", "it is gone")
    ipam.withhold("contest", "")
    with pytest.raises(Unavailable, match="it is gone"):
        take(ipam, 1)
    ipam.withhold("core Node", "")
    take(ipam, 1)


# The core Node


class Facts(dict[str, str]):
    def write_fact(self, name: str, value: str) -> None:
        self[name] = value

    def read_fact(self, name: str) -> str:
        return self.get(name, "")


class World:
    """A node that serves ranges, and its core Node."""

    def __init__(self, *, is_given: bool = True, uid: str = "") -> None:
        self.store, self.facts, self.core = MemoryStore(), Facts(), OwnCoreNode()
        if uid:
            self.facts[UID_FACT] = uid
        self.ranges, self.strays = networks(OLD), networks()
        self.withheld, self.told, self.failures = "", threading.Event(), 0
        self.warnings: dict[str, str] = {}
        self.warned: list[str] = []
        """Everything that was ever warned of: some of it is over after a second."""
        self.keeper = RangeKeeper(
            store=self.store,
            node_name="n1",
            facts=self.facts,
            served=ServedRanges(
                is_given=is_given,
                ranges=lambda: self.ranges,
                strays=lambda: self.strays,
                serve=self.serve,
                withhold=lambda why: setattr(self, "withheld", why),
                tell=self.told.set,
            ),
            core=self.core,
            warn=self.warn,
        )

    def warn(self, name: str, message: str) -> None:
        self.warnings[name] = message
        self.warned.append(message)

    def serve(self, ranges: tuple[IPNetwork, ...]) -> None:
        if self.failures:
            self.failures -= 1
            raise KernelFailure(12, "add route", "x")
        # What is not asked for any more is given out to nobody else while the ranges change.
        self.strays, self.ranges = networks("10.244.1.5/32"), ranges

    def put(self, **spec: Any) -> StoredObject:
        document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": spec}
        return self.store.create(StoredObject(key=core_node_key("n1"), document=document))

    def change(self, **spec: Any) -> None:
        stored = self.store.get(core_node_key("n1"))
        assert stored is not None
        document = {**stored.document, "spec": spec}
        self.store.update(StoredObject(key=stored.key, revision=stored.revision, document=document))

    def delete(self) -> None:
        self.store.delete(core_node_key("n1"))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.keeper.stop()


def test_a_node_made_anew_serves_its_other_ranges_without_a_restart(world: World) -> None:
    world.put(podCIDRs=[OLD])
    world.keeper.start()
    wait_for(lambda: world.core.uid, "the core Node")
    first = world.core.uid
    world.delete()
    wait_for(lambda: "is gone" in world.withheld, "the end of the Node")
    assert "no core Node n1" in (world.core.why_silent or "")
    world.put()
    wait_for(lambda: "has no podCIDR" in world.withheld, "the new Node")
    wait_for(lambda: "--allocate-node-cidrs" in world.warnings[WARNING], "what is said of it")
    assert world.core.uid != first
    assert world.core.why_silent is None
    world.change(podCIDRs=[NEW])
    wait_for(lambda: not world.withheld, "its range")
    assert world.ranges == networks(NEW)
    assert world.facts[RANGES_FACT] == f'["{NEW}"]'
    wait_for(lambda: "10.244.1.5" in world.warnings[WARNING], "what is said of its pods")
    assert "start them again" in world.warnings[WARNING]


def test_a_node_made_anew_with_the_same_range_goes_on(world: World) -> None:
    world.put(podCIDRs=[OLD])
    world.keeper.start()
    wait_for(lambda: world.core.uid, "the core Node")
    first = world.core.uid
    world.delete()
    world.put(podCIDRs=[OLD])
    wait_for(lambda: world.core.uid != first and not world.withheld, "the new Node")
    assert not world.strays
    assert world.facts[UID_FACT] == world.core.uid


def test_what_fails_is_said_and_tried_again(world: World) -> None:
    world.failures = 1
    world.put(podCIDRs=[NEW])
    world.keeper.start()
    wait_for(lambda: any("add route" in one for one in world.warned), "the failure")
    wait_for(lambda: world.ranges == networks(NEW), "the second try")


def test_nothing_is_published_before_the_core_node_was_heard_of(world: World) -> None:
    assert world.core.why_silent == ""
    world.put(podCIDRs=[OLD])
    world.keeper.start()
    wait_for(lambda: world.core.why_silent is None, "the core Node")
    wait_for(world.told.is_set, "those who publish to be told")


def test_what_an_earlier_life_knew_serves_while_the_api_server_is_away() -> None:
    world = World(uid="u1")
    world.store.away = True
    world.keeper.start()
    assert (world.core.uid, world.core.why_silent, world.withheld) == ("u1", None, "")
    world.keeper.stop()


def test_ranges_of_a_setting_stay_whatever_the_core_node_says() -> None:
    world = World(is_given=False)
    world.put(podCIDRs=[NEW])
    world.keeper.start()
    wait_for(lambda: world.core.uid, "the core Node")
    world.delete()
    wait_for(lambda: world.core.why_silent, "its end")
    assert (world.ranges, world.withheld) == (networks(OLD), "")
    world.keeper.stop()


def test_a_node_that_can_be_read_again_is_no_longer_warned_of(world: World) -> None:
    world.put(podCIDRs=[OLD])
    world.keeper.start()
    wait_for(lambda: world.core.uid, "the core Node")
    world.change(podCIDRs=["nonsense"])
    wait_for(lambda: "nonsense" in world.warnings.get(WARNING, ""), "the warning")
    world.change(podCIDRs=[OLD])
    wait_for(lambda: not world.warnings[WARNING], "its end")

"""Any sequence of allocations, releases and restarts, against a model too simple to be wrong."""

from ipaddress import IPv4Address, ip_address

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from podwire.control.ipam.interface import Wish
from podwire.control.ipam.node import NodeIpam
from podwire.model.endpoint import IPAddress
from podwire.model.errors import AddressUnavailable, Bug, Exhausted
from podwire.model.ids import EndpointId, IdentityId

RANGES = ("10.0.0.0/29", "10.0.1.0/30", "fd00::/125")
PODS_OF: list[set[IPAddress]] = [
    {ip_address(f"10.0.0.{number}") for number in (0, *range(2, 8))},
    {ip_address(f"10.0.1.{number}") for number in range(4)},
    {ip_address(f"fd00::{number}") for number in (0, *range(2, 8))},
]
PODS = {4: PODS_OF[0] | PODS_OF[1], 6: PODS_OF[2]}
OUTSIDE: list[IPAddress] = [
    *(ip_address(one) for one in ("10.0.0.1", "10.0.2.2", "10.0.0.8", "fd00::1")),
]

IDENTITIES = st.integers(0, 3).map(IdentityId)
WISHES = st.lists(
    st.sampled_from([*sorted(PODS[4], key=int), *sorted(PODS[6], key=int), *OUTSIDE]),
    max_size=2,
    unique_by=lambda address: address.version,
)


class AddressMachine(RuleBasedStateMachine):
    """A node's addresses beside a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.ipam = NodeIpam(RANGES)
        self.held: dict[EndpointId, tuple[IPAddress, ...]] = {}
        self.identity: dict[EndpointId, IdentityId] = {}
        self.quarantined: set[EndpointId] = set()
        self.rested: list[tuple[IPAddress, IdentityId]] = []
        self.next_id = EndpointId(1)

    def list_held(self) -> set[IPAddress]:
        """Give all addresses that somebody has."""
        return {address for addresses in self.held.values() for address in addresses}

    @rule(identity=IDENTITIES, wanted=WISHES)
    def allocate(self, identity: IdentityId, wanted: list[IPAddress]) -> None:
        owner = self.next_id
        self.next_id = EndpointId(owner + 1)
        held = self.list_held()
        bad = any(one in held or one not in PODS[one.version] for one in wanted)
        wished = {one.version for one in wanted}
        full = any(PODS[family] <= held for family in {4, 6} - wished)
        if bad or full:
            with pytest.raises(AddressUnavailable if bad else Exhausted):
                self.ipam.take(owner, Wish(identity=identity, wanted=tuple(wanted)))
            return
        given = [
            one
            for one in self.ipam.take(owner, Wish(identity=identity, wanted=tuple(wanted)))
            if one is not None
        ]
        assert [one.version for one in given] == [4, 6]
        for address in given:
            assert address not in held
            assert address in PODS[address.version]
            if address.version in wished:
                assert address in wanted
            else:
                self.check_choice(address, identity)
        self.take(owner, tuple(given), identity)

    def check_choice(self, address: IPAddress, identity: IdentityId) -> None:
        """The same identity's rested address, else one never used, else the one that rested longest."""
        own = [
            one
            for one, had in self.rested
            if had == identity and one.version == address.version and identity
        ]
        if own:
            assert address in own
            return
        held = self.list_held()
        ranges = [one for one in PODS_OF if {address.version} == {pod.version for pod in one}]
        first = next(one for one in ranges if one - held)
        assert address in first
        resting = [one for one, _ in self.rested if one in first]
        if first - held - set(resting):
            assert address not in resting
        else:
            assert address == resting[0]

    def take(
        self, owner: EndpointId, addresses: tuple[IPAddress, ...], identity: IdentityId
    ) -> None:
        self.held[owner] = addresses
        self.identity[owner] = identity
        self.rested = [one for one in self.rested if one[0] not in addresses]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.ipam.release(owner)
        self.rested += [(one, self.identity[owner]) for one in self.held.pop(owner)]
        self.quarantined.discard(owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.ipam.quarantine(owner)
        self.quarantined.add(owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def adopt_what_somebody_has(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        address = data.draw(st.sampled_from(self.held[owner]))
        with pytest.raises(Bug):
            self.ipam.adopt(self.next_id, [address])
        with pytest.raises(Bug):
            self.ipam.take(owner, Wish())

    @rule()
    def restart(self) -> None:
        self.ipam = NodeIpam(RANGES)
        for owner in sorted(self.held):
            self.ipam.adopt(
                owner,
                self.held[owner],
                identity=self.identity[owner],
                quarantined=owner in self.quarantined,
            )
        self.rested = []

    @rule(owner=st.integers(1000, 1010).map(EndpointId))
    def end_a_stranger(self, owner: EndpointId) -> None:
        self.ipam.release(owner)
        self.ipam.quarantine(owner)

    @invariant()
    def memory_is_what_the_model_says(self) -> None:
        holders = self.ipam.holders()
        assert {owner: one.addresses for owner, one in holders.items()} == self.held
        assert {owner for owner, one in holders.items() if one.quarantined} == self.quarantined
        for owner, addresses in self.held.items():
            assert all(self.ipam.find_owner(address) == owner for address in addresses)
        assert self.ipam.find_owner(IPv4Address("10.0.0.1")) is None

    @invariant()
    def usage_adds_up(self) -> None:
        held = self.list_held()
        for usage in self.ipam.usage():
            inside = {
                address
                for address in held
                if address.version == usage.cidr.version and address in usage.cidr
            }
            assert (usage.held, usage.capacity) == (len(inside), usage.held + usage.free)
        waiting = sum(len(self.held[owner]) for owner in self.quarantined)
        assert sum(usage.quarantined for usage in self.ipam.usage()) == waiting


TestAddresses = AddressMachine.TestCase
TestAddresses.settings = settings(stateful_step_count=40)

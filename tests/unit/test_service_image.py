"""The flat memory of services says what dictionaries would say, after any changes."""

import ipaddress
import random

import pytest

from podwire.datapath.service_image import BackEndNumbers, SlotList, SlotLists
from podwire.model.interfaces import BackEnd, Frontend

TCP, UDP = 6, 17


def any_back_end(chance: random.Random, most: int) -> BackEnd:
    number = chance.randrange(most)
    address = ipaddress.ip_address(
        f"10.7.{number // 250}.{number % 250}" if number % 3 else f"fd07::{number:x}"
    )
    return BackEnd(address, 80 + number % 2, (TCP, UDP)[number % 5 == 0])


@pytest.mark.parametrize(("most", "steps"), [(30, 3000), (3000, 12_000)])
def test_numbers_of_back_ends_are_those_that_were_put(most: int, steps: int) -> None:
    chance = random.Random(5)
    numbers, wanted = BackEndNumbers(), dict[BackEnd, int]()
    for step in range(1, steps):
        back_end = any_back_end(chance, most)
        # Grows to most of what there may be, and shrinks to little again.
        if chance.random() < (0.75 if step < steps // 2 else 0.25):
            numbers.put(back_end, step)
            wanted[back_end] = step
        else:
            numbers.remove([back_end])
            wanted.pop(back_end, None)
        assert numbers.find(back_end) == wanted.get(back_end, 0)
        assert len(numbers) == len(wanted)
    assert sorted(numbers) == sorted(wanted.values())
    assert {back_end: numbers.find(back_end) for back_end in wanted} == wanted
    gone = list(wanted)[::2]
    numbers.remove(gone)
    wanted = {back_end: number for back_end, number in wanted.items() if back_end not in set(gone)}
    assert not any(back_end in numbers for back_end in gone)
    assert {back_end: numbers.find(back_end) for back_end in wanted} == wanted


def test_lists_are_those_that_were_put() -> None:
    lists = SlotLists()
    one, two = (
        Frontend(ipaddress.ip_address(text), port, TCP)
        for text, port in (("10.96.0.1", 80), ("fd96::1", 0))
    )
    lists.put(one, SlotList(7, [3, 2, (1 << 31) - 1], 86_400, 1023))
    lists.put(two, SlotList(8))
    found = lists.get(one)
    assert found is not None
    assert (found.number, list(found.slots), found.affinity_s, found.place) == (
        7, [3, 2, (1 << 31) - 1], 86_400, 1023
    )  # fmt: skip
    assert (list(lists), len(lists), one in lists) == ([one, two], 2, True)
    assert lists.pop(two).number == 8
    assert lists.get(two) is None
    assert list(lists) == [one]

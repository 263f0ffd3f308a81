"""What programs may cost the verifier, so that there is room for what is still to come."""

from contextlib import ExitStack

import pytest

from tests.packet.bpf_stack import deepest_stack
from tests.packet.rig import OBJECTS, PROGRAMS, load_objects

pytestmark = pytest.mark.packet

VERIFIED_LIMIT = 500_000
"""Half of what a kernel verifies before it refuses. Each kernel counts another number: tier vm runs this file, too."""
STACK_LIMIT_BYTES = 400
"""Of 512."""


def test_every_program_stays_below_half_of_what_the_verifier_does() -> None:
    with ExitStack() as stack:
        programs, _ = load_objects((*PROGRAMS, "conntrack_gc"), stack, build="")
        verified = {name: one.info.verified_insns for name, one in programs.items()}
    assert set(verified) == {*PROGRAMS, "conntrack_gc_start", "hand_over", "pulse_start"}
    assert {name: count for name, count in verified.items() if count >= VERIFIED_LIMIT} == {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_deepest_chain_of_calls_leaves_stack_to_spare(name: str) -> None:
    data = (OBJECTS / f"{name}.bpf.o").read_bytes()
    assert 0 < deepest_stack(data, name) < STACK_LIMIT_BYTES

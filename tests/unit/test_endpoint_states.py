"""The transition table: every pair of state and event is either in it or refused, and the picture in the docs is it."""

import itertools
from pathlib import Path

import pytest

from podwire.control.endpoint.states import (
    TRANSITIONS,
    Event,
    IllegalTransition,
    State,
    next_state,
)

EVENTS: list[type[Event]] = Event.__subclasses__()
TREE = Path(__file__).parents[2] / "docs" / "tree.md"


def make(event: type[Event]) -> Event:
    return event(cause="test")


@pytest.mark.parametrize(
    ("state", "event"),
    list(itertools.product(State, EVENTS)),
    ids=lambda value: value.value if isinstance(value, State) else value.__name__,
)
def test_a_pair_is_in_the_table_or_raises(state: State, event: type[Event]) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, make(event)) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition):
            next_state(state, make(event))


def test_every_state_but_the_terminal_ones_can_end() -> None:
    reachable = {
        state: {new for (old, _), new in TRANSITIONS.items() if old is state} for state in State
    }
    for state in State:
        seen, edge = {state}, {state}
        while edge:
            edge = set().union(*(reachable[one] for one in edge)) - seen
            seen |= edge
        assert State.DISCONNECTED in seen, state


def test_terminal_states_lead_nowhere() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is State.DISCONNECTED]


def test_the_diagram_in_the_docs_is_the_table() -> None:
    text = TREE.read_text(encoding="utf-8")
    wanted = [
        f"    {old.value} --> {new.value}: {event.__name__}"
        for (old, event), new in TRANSITIONS.items()
        if old is not new
    ]
    block = text.split("stateDiagram-v2\n", 1)[1].split("```", 1)[0].rstrip("\n").split("\n")
    assert block == wanted

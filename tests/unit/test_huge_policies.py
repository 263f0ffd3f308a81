"""Policies as large as an API server takes them: whoever may write one must not keep an agent from its other work."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from podwire.control.policy.reading import Unenforceable, name_policy, read_policy
from podwire.model.identity import IdentityFacts
from podwire.model.ids import EndpointId
from podwire.model.labels import namespace_labels, sort_labels
from podwire.model.store import ObjectKey
from tests.fakes.policy import make_engine

RULES: Final = 10_000
"""In half a megabyte; an API server takes three times as much."""
LONGEST_S: Final = 60.0
"""Of a processor: some seconds are used. What takes as long as the square of the rules takes many minutes."""
KEY: Final = ObjectKey("networkpolicies", "tenant", "huge")
SHAPES: Final[Mapping[str, Callable[[int], dict[str, Any]]]] = {
    "ports": lambda number: {"ports": [{"port": 1 + number % 65535}]},
    "blocks": lambda number: {
        "from": [{"ipBlock": {"cidr": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}/32"}}]
    },
    "selectors": lambda number: {"from": [{"podSelector": {"matchLabels": {"app": f"a{number}"}}}]},
}


@pytest.mark.parametrize("is_here", [True, False], ids=["with a pod here", "without"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_huge_policy_is_changed_as_a_whole_in_no_time(
    shape: Callable[[int], dict[str, Any]], is_here: bool
) -> None:
    engine = make_engine()
    if is_here:
        labels = sort_labels(["k8s:app=a7", *namespace_labels("tenant", {})])
        engine.identity_added(IdentityFacts(70000, labels))
        engine.apply()
        engine.attach(EndpointId(1), 70000)
        engine.realized(EndpointId(1))
    begin_s = time.process_time()
    for first in (0, 7):  # other rules in every place
        document = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": KEY.name, "namespace": KEY.namespace},
            "spec": {
                "podSelector": {},
                "ingress": [shape(first + number) for number in range(RULES)],
            },
        }
        rules = read_policy(KEY, document)
        assert not isinstance(rules, Unenforceable)
        engine.set_policy(name_policy(KEY), rules)
        engine.apply()
    engine.remove_policy(name_policy(KEY))
    engine.apply()
    assert time.process_time() - begin_s < LONGEST_S

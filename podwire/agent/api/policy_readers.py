"""What the handlers about policy read: the node's parts, each behind one name.

Made by `agent.assemble`, used by `agent.api.policies` and `agent.api.trace`. Nothing is decided here.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from podwire.control.endpoint.enforce import Enforcer
from podwire.control.endpoint.policies import PolicyObjects
from podwire.control.endpoint.table import EndpointTable
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.policy.engine import PolicyEngine
from podwire.control.services.catalogue import ServiceView
from podwire.control.services.facts import ServiceName
from podwire.model.config import AgentConfig
from podwire.model.endpoint import EndpointRecord, IPAddress
from podwire.model.ids import EndpointId


@dataclass(frozen=True)
class PolicyReaders:
    """What the handlers look at."""

    enforcer: Enforcer
    objects: PolicyObjects
    resolver: IdentityResolver
    table: EndpointTable
    identity_at: Callable[[IPAddress], int | None]
    """What the programs know of an address that no pod of this node has; None or 0 = in no prefix that they know."""
    hits: Callable[[], Mapping[int, tuple[int, int]]]
    """Rule -> packets and bytes of what it decided."""
    change_labels: Callable[[EndpointId, list[str]], EndpointRecord]
    """Change labels and have the endpoint built; waits for the store."""
    set_audit: Callable[[EndpointId, bool | None], EndpointRecord]
    """Let policies of one endpoint only report (True), or be enforced (False), or as the node says (None)."""
    find_service: Callable[[ServiceName], ServiceView | None] | None = None
    """None where services are left to the stack."""

    @property
    def engine(self) -> PolicyEngine:
        """The engine."""
        return self.enforcer.engine


class Live(Protocol):
    """Settings in force."""

    @property
    def current(self) -> AgentConfig: ...


class Api(Protocol):
    """What `agent.api.routes.Api` has for these handlers."""

    @property
    def policy(self) -> PolicyReaders: ...

    @property
    def config(self) -> Live: ...

    @property
    def turn(self) -> threading.RLock: ...

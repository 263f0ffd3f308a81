"""The policy engine: what is known of policies and identities goes in, changes of slots and endpoints' rows come out.

Called by the agent under the node's turn, by one thread at a time. `set_*`, `remove_*` and `identity_*` only note what is
wanted; `apply` and `attach` do the work, in proportion to what changed, and reach the kernel through PolicyDatapath
alone. Pure otherwise: no clock, no threads, no store. Invariant: at each instant every flow of every endpoint meets
either the verdict before a change or the one after it, never a third.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podwire.control.policy.oracle import Enforcement, RuleName
from podwire.control.policy.rule import CidrGroup, IdentityFacts, PolicyId, PolicyRules
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import PodwireError
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig, PolicyDatapath
from podwire.model.policy import IPNetwork, PolicyRows


@dataclass(frozen=True, slots=True)
class PolicyValues:
    """What policy decides about the row of every endpoint of one identity."""

    identity: int
    slot: int = 0
    revision: int = 0
    deny_egress: bool = False
    deny_ingress: bool = False
    default_rule_egress: int = 0
    default_rule_ingress: int = 0
    cidr_egress: bool = False
    cidr_ingress: bool = False

    def fill(self, config: EndpointConfig) -> EndpointConfig:
        """Give `config` with these values; what policy does not decide (audit, host_allowed, trace) stays."""
        return replace(
            config,
            identity=self.identity,
            slot=self.slot,
            policy_revision=self.revision,
            deny_egress=self.deny_egress,
            deny_ingress=self.deny_ingress,
            default_rule_egress=self.default_rule_egress,
            default_rule_ingress=self.default_rule_ingress,
            cidr_egress=self.cidr_egress,
            cidr_ingress=self.cidr_ingress,
        )


EndpointRows = Callable[
    [Sequence[EndpointId], PolicyValues], Iterable[tuple[EndpointRecord, EndpointConfig]]
]
"""Asks the agent for the rows of endpoints with new values: `(table[id].record, values.fill(table[id].config))`."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers from which on nothing was ever used on this node: kept by the agent across restarts."""

    slot: int = 1
    rule: int = 1
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """One identity that could not be brought to its policies; what was in force for it stays in force."""

    identity: int
    error: PodwireError
    endpoints: tuple[EndpointId, ...]
    policies: tuple[PolicyId, ...]
    """The policies that select it, those of the failed change first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one `apply` did."""

    revision: int
    changed: Mapping[EndpointId, PolicyValues] = field(default_factory=dict)
    """Endpoints whose rows were rewritten, with what they hold now."""
    failed: tuple[Failure, ...] = ()
    """All identities that are behind now, also those that failed before and did again."""
    recovered: tuple[EndpointId, ...] = ()
    """Endpoints that were behind before and are not any more."""


class PolicyEngine:
    """Every policy and identity this node knows, and the slots of its endpoints.

    `rows` gives endpoints' rows (see EndpointRows); `numbers` is what `remember` was last told, `Numbers()` on a new
    node; `cidrs` what the datapath's map of CIDRs holds from before (empty on a new node).
    """

    def __init__(
        self,
        *,
        datapath: PolicyDatapath,
        rows: EndpointRows,
        numbers: Numbers,
        remember: Callable[[Numbers], None],
        cidrs: Mapping[IPNetwork, int],
        enforcement: Enforcement = Enforcement.DEFAULT,
    ) -> None:
        raise NotImplementedError

    def set_enforcement(self, enforcement: Enforcement) -> None:
        """Take another setting `policy_enforcement`; in force after `apply`."""
        raise NotImplementedError

    def set_policy(self, policy: PolicyId, rules: tuple[PolicyRules, ...]) -> None:
        """Take a new or changed object; in force after `apply`."""
        raise NotImplementedError

    def remove_policy(self, policy: PolicyId) -> None:
        """Forget an object; out of force after `apply`."""
        raise NotImplementedError

    def set_group(self, group: CidrGroup) -> None:
        """Take a new or changed CIDR group."""
        raise NotImplementedError

    def remove_group(self, name: str) -> None:
        """Forget a CIDR group."""
        raise NotImplementedError

    def identity_added(self, facts: IdentityFacts) -> None:
        """Learn of an identity, of this node or another; known ones are ignored. Reserved ones are always known."""
        raise NotImplementedError

    def identity_removed(self, number: int) -> None:
        """Forget an identity that nobody bears any more; one that an endpoint here bears is kept until it does not."""
        raise NotImplementedError

    def adopt(self, endpoint_id: EndpointId, config: EndpointConfig) -> None:
        """At start, before the first `apply`: an endpoint lives whose row holds `config`, of an earlier process.

        The first `apply` compares its slot with what should be in it, and changes or replaces it if that differs.
        """
        raise NotImplementedError

    def attach(self, endpoint_id: EndpointId, identity: int) -> Outcome:
        """Give an endpoint an identity (a new endpoint, or one whose labels changed): applies what is pending, and
        fills the identity's slot when it is the first here. Then `config_for` tells what its row must hold; the caller
        writes it and calls `realized`. Raises NotFound for an unknown identity, PolicyOverflow, KernelFailure; then
        nothing changed for this endpoint."""
        raise NotImplementedError

    def realized(self, endpoint_id: EndpointId) -> None:
        """Note that the endpoint's row holds `config_for` of its identity: from now on `apply` keeps it so."""
        raise NotImplementedError

    def detach(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint whose row is gone (or an attach that was undone). Unknown ones are ignored."""
        raise NotImplementedError

    def apply(self) -> Outcome:
        """Bring all that is pending into force as one revision; nothing pending, nothing behind: nothing is done."""
        raise NotImplementedError

    def collect(self) -> bool:
        """Delete slots that no row names any more, and CIDRs that no rule names; some milliseconds when there are any.
        To be called now and then, and soon after an `apply`. True when it did something."""
        raise NotImplementedError

    @property
    def is_pending(self) -> bool:
        """Tell whether `apply` would do something."""
        raise NotImplementedError

    @property
    def revision(self) -> int:
        """Revision of the policies in force."""
        raise NotImplementedError

    def realized_revision(self, endpoint_id: EndpointId) -> int:
        """Give the revision that an endpoint is at: the node's, or an earlier one while it is behind; 0 = none yet."""
        raise NotImplementedError

    def config_for(self, identity: int) -> PolicyValues:
        """Give what rows of an attached identity hold, or must hold when they are written now. NotFound."""
        raise NotImplementedError

    def rows_for(self, identity: int) -> PolicyRows:
        """Give the entries that an attached identity's slot holds (`policy entries`, CHECK). NotFound."""
        raise NotImplementedError

    def rule_name(self, number: int) -> RuleName | None:
        """Name the rule of an entry, event or counter; also of rules removed a while ago."""
        raise NotImplementedError

    def list_policies(self) -> Sequence[PolicyRules]:
        """Give all rules taken in by the last `apply`, for the oracle and people."""
        raise NotImplementedError

    def list_groups(self) -> Sequence[CidrGroup]:
        """Give all CIDR groups, by name."""
        raise NotImplementedError

    def policies_of(self, identity: int) -> Sequence[PolicyId]:
        """Give the policies that select an attached identity. NotFound."""
        raise NotImplementedError

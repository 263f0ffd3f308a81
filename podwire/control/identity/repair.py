"""Which endpoints do not have the identity that their labels ask for, and what becomes of each.

`agent.duties.identity` calls it at each tick, because a label set that is new must be written to the store first. The
caller hands in how an endpoint is changed over. Invariant: an endpoint keeps its identity until the new one exists.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from podwire.control.identity.feed import IdentityFeed
from podwire.control.identity.resolver import Resolution
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.ids import EndpointId

_log = logging.getLogger(__name__)

ChangeOver = Callable[[EndpointRecord, Resolution, str], bool]
"""Give an endpoint another identity, for a cause; False when its record is another by now."""


@dataclass
class IdentityRepair:
    """Finds and changes the endpoints of one node that are not what they should be."""

    feed: IdentityFeed
    change_over: ChangeOver
    _checked: set[EndpointId] = field(default_factory=set)
    _pending: set[EndpointId] = field(default_factory=set)

    def repair(self, records: Collection[EndpointRecord]) -> Unavailable | None:
        """Give living endpoints whose labels or number are not what they should be the right ones.

        Endpoints that must wait for the store keep what they have. Gives the error that they wait for.
        """
        resolver = self.feed.resolver
        if not resolver.sources.is_complete:
            return None
        doubt = self.feed.take_doubt()
        # An endpoint is looked at when it is new, too: its labels may have changed after its ADD read them and before
        # it stood in the table, where a change would have found it.
        suspects = [
            record
            for record in records
            if record.id not in self._checked or doubt.may_touch(record)
        ]
        self._checked = {record.id for record in records}
        # Endpoints that ended while they waited for the store are forgotten.
        self._pending &= self._checked
        self._pending |= {record.id for record in resolver.affected(suspects)}
        waiting_for: Unavailable | None = None
        for record in [record for record in records if record.id in self._pending]:
            try:
                if self._relabel(record):
                    self._pending.discard(record.id)
            except Unavailable as error:
                waiting_for = error
        return waiting_for

    def _relabel(self, record: EndpointRecord) -> bool:
        """Change one endpoint over; after False or Unavailable it keeps what it has, and is tried again."""
        try:
            resolution = self.feed.resolver.resolve_again(record)
            return self.change_over(record, resolution, "labels changed")
        except Unavailable:
            raise
        except PodwireError as error:
            _log.warning(
                "relabel endpoint failed; it keeps its identity, it is retried",
                extra={"endpoint": record.id, "error": error.message},
            )
            return False

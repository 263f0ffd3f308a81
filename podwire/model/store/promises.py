"""What one back end promises and another cannot: docs/store.md, "What a store may lack", says what is done then.

Given by `Store.promises`, the same each time. Everything that is not here holds for every back end. Leases are asked
for where they are needed: `Store.leases` gives None where there are none.
"""

from typing import Final

import msgspec


class Promises(msgspec.Struct, frozen=True):
    """What a back end does beyond what every back end does."""

    one_order: bool
    """Revisions of all kinds are one count, and a watch gives changes of several kinds in the order of that count. Else
    the revisions of two kinds have nothing to do with each other."""
    together_max: int
    """So many writes of `Store.together` take effect all or none; 1: each takes effect by itself, at once."""
    notices_other_store: bool
    """A watch after a revision that the store never had, because it was replaced or put back, raises Compacted."""
    owns_namespaces: bool
    """Namespaces are podwire's to create and to delete; else the cluster's own programs and people do that."""
    any_name: bool
    """Names are any text. Else they are what Kubernetes allows, and InvalidRequest refuses others."""


FULL: Final = Promises(
    one_order=True,
    together_max=1 << 30,
    notices_other_store=True,
    owns_namespaces=True,
    any_name=True,
)
"""What a store of podwire's own can promise."""

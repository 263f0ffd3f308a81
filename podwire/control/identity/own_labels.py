"""Changes of the labels that an endpoint has of its own: `podwire endpoint label ID k=v... k-`. Pure.

Called by the identity duty for the API. Invariant: nobody can add or remove the labels for a pod's namespace, network
or name, and a label of a Workload changes only with the Workload.
"""

from collections.abc import Callable, Sequence
from typing import Final

from podwire.model.errors import Fault, InvalidRequest
from podwire.model.labels import (
    OWN_PREFIX,
    SOURCE_CNI,
    SOURCES,
    is_label_key,
    is_label_value,
    sort_labels,
)

CHANGES_MAX: Final = 256
_FOREIGN: Final = tuple(f"{source}:" for source in SOURCES)
OF_NAMESPACES: Final = ("io.kubernetes.", "io.cilium.")
"""Keys that begin so tell of a pod's namespace: nothing that people say of a pod may have them."""
WorkloadOf = Callable[[str], str]
"""Names the Workload object that gives this endpoint a label of a key; "" when none does."""


def change_own_labels(
    own_labels: Sequence[str], changes: Sequence[str], workload_of: WorkloadOf
) -> tuple[str, ...]:
    """Give an endpoint's own labels after changes `k=v` (set) and `k-` (take away), a key with or without `cni:`.

    Taking away what is not there is no error. InvalidRequest names every change that is refused; then none is done.
    """
    faults: list[Fault] = []
    wanted: dict[str, str | None] = {}
    if len(changes) > CHANGES_MAX:
        faults.append(Fault("labels", f"has {len(changes)} changes, more than {CHANGES_MAX}"))
    for index, text in enumerate(changes[:CHANGES_MAX]):
        key, value = _read_change(text)
        message = _find_fault(text, key, value, workload_of)
        if not message and wanted.get(key, value) != value:
            message = "is changed twice"
        if message:
            faults.append(Fault(f"labels[{index}]", f"{text[:80]!r}: {message}"))
        wanted[key] = value
    if faults:
        raise InvalidRequest(
            "change labels: " + "; ".join(f"{fault.path} {fault.message}" for fault in faults[:5]),
            hint="write KEY=VALUE to set a label and KEY- to take it away",
            faults=tuple(faults),
        )
    # With the "=", so that a change of `app` does not touch `app2`.
    changed = tuple(f"{SOURCE_CNI}:{key}=" for key in wanted)
    kept = [label for label in own_labels if not label.startswith(changed)]
    given = [f"{SOURCE_CNI}:{key}={value}" for key, value in wanted.items() if value is not None]
    return sort_labels((*kept, *given))


def _read_change(text: str) -> tuple[str, str | None]:
    """Give key and value; the value None = take away."""
    body = text.removeprefix(f"{SOURCE_CNI}:")
    key, equals, value = body.partition("=")
    if not equals and body.endswith("-"):
        return body[:-1], None
    return key, value


def _find_fault(text: str, key: str, value: str | None, workload_of: WorkloadOf) -> str:
    """Say why a change is refused; "" when it is not."""
    workload = workload_of(key)
    reasons = (
        ("=" not in text and value is not None, "is neither KEY=VALUE nor KEY-"),
        (key.startswith(_FOREIGN), "only labels of the source cni can be set by hand"),
        (not is_label_key(key), f"{key[:80]!r} is not a label key ([prefix/]name)"),
        (key.startswith(f"{OWN_PREFIX}/"), f"{OWN_PREFIX}/ is reserved for podwire"),
        (key.startswith(OF_NAMESPACES), "it belongs to a namespace; label the Namespace object"),
        (not is_label_value(value or ""), f"{(value or '')[:80]!r} is not a label value"),
        (bool(workload), f"it comes from the Workload object {workload!r}; change that"),
    )
    return next((message for refused, message in reasons if refused), "")

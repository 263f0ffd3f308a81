"""What the API server's refusals mean, and what a person can do about each.

Used by `store.kubernetes`. Pure. Only what no repetition can change is InvalidRequest. Missing permissions, missing
CRDs, expired credentials and webhooks that say no can be put right while the agent runs, so they are Unavailable, and
are tried again.
"""

from typing import Final

import msgspec

from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError, Unavailable
from podwire.model.store import KindUnavailable
from podwire.store.kubernetes.api.resources import CRD_FILES, Resource
from podwire.store.kubernetes.api.wire import EXPIRED, Status

UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
CONFLICT: Final = 409
TOO_LARGE: Final = 413
INVALID: Final = 422
TOO_MANY: Final = 429
OVERLOADED: Final = frozenset({TOO_MANY, 503})
"""HTTP statuses after which the request was not carried out and may be sent again, later."""
_NEVER: Final = frozenset({400, TOO_LARGE, 415, INVALID})
_ALREADY_EXISTS: Final = "AlreadyExists"
_STRICT: Final = "strict decoding error"


class Intent(msgspec.Struct, frozen=True):
    """What a request is for, in the words of RBAC."""

    verb: str
    resource: Resource
    name: str = ""
    namespace: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        where = f"{self.namespace}/{self.name}".strip("/")
        return f"{self.verb} {self.rbac_name}{' ' if where else ''}{where}"

    @property
    def rbac_name(self) -> str:
        """The resource with its group, and what of it: `identities/status.podwire.io` as kubectl writes it."""
        tail = f"/{self.subresource}" if self.subresource else ""
        group = f".{self.resource.group}" if self.resource.group else ""
        return f"{self.resource.plural}{tail}{group}"


class Refused(Exception):
    """The API server's answer is no."""

    def __init__(self, intent: Intent, status: Status, retry_after_s: float = 0.0) -> None:
        super().__init__(status.message)
        self.intent = intent
        self.status = status
        self.retry_after_s = retry_after_s or float(status.subject.retry_after_seconds)

    @property
    def code(self) -> int:
        """The HTTP status."""
        return self.status.code

    @property
    def is_overload(self) -> bool:
        """Whether the same request may succeed soon, and was not carried out."""
        return self.code in OVERLOADED

    @property
    def is_expired(self) -> bool:
        """Whether a revision, or the rest of a paged list, is not known any more."""
        return self.code == EXPIRED

    @property
    def is_taken(self) -> bool:
        """Whether the name exists already."""
        return self.code == CONFLICT and self.status.reason == _ALREADY_EXISTS

    @property
    def is_without_object(self) -> bool:
        """Whether the resource is there and the object is not."""
        about = self.status.subject
        return self.code == NOT_FOUND and about.name == self.intent.name != ""

    @property
    def is_without_resource(self) -> bool:
        """Whether the API server does not know the resource: there is no such CRD, or not in this version."""
        # For a path that it does not serve the API server answers without `details`, which would name an object.
        return self.code == NOT_FOUND and not self.status.subject.name


def explain(refused: Refused, who: str) -> PodwireError:
    """Make our error of an answer; `who` says whose credentials were shown."""
    intent, code = refused.intent, refused.code
    message = f"{intent}: {refused.status.message or f'HTTP {code}'}"
    if code == UNAUTHORIZED:
        return Unavailable(
            f"{intent}: the API server does not accept the credentials {who}",
            hint="they have expired, are not valid yet, or are of another cluster; do the clocks of this host and of"
            " the API server agree? a token's file is read again by itself",
        )
    if refused.is_without_resource:
        return _explain_absent(intent)
    if code == FORBIDDEN:
        return _explain_forbidden(intent, message, who)
    if code in (NOT_FOUND, CONFLICT):
        return _explain_state(refused, message)
    if code in _NEVER or _is_too_large(refused):
        return _explain_never(refused, message)
    return _explain_passing(refused, message)


def _explain_state(refused: Refused, message: str) -> PodwireError:
    if refused.code == CONFLICT:
        return Conflict(message, hint="somebody else has changed it: read it again and repeat")
    return NotFound(message, hint=f"see kubectl get {refused.intent.resource.full_name}")


def _explain_absent(intent: Intent) -> PodwireError:
    resource = intent.resource
    hint = (
        f"kubectl apply -f {CRD_FILES}/ (or deploy/podwire.yaml) makes its CRD, {resource.full_name}"
        if resource.is_own
        else f"does this API server serve {resource.api_version}?"
    )
    return KindUnavailable(
        f"{intent}: the API server has no {resource.full_name} in {resource.api_version}", hint=hint
    )


def _explain_forbidden(intent: Intent, message: str, who: str) -> PodwireError:
    if _is_admission(message):
        return _explain_admission(intent, message)
    group = intent.resource.group
    return KindUnavailable(
        f"{message} ({who})",
        hint=f'RBAC: allow verb "{intent.verb}" on "{intent.rbac_name.removesuffix(f".{group}")}"'
        f' of API group "{group}" (deploy/podwire.yaml has the whole table)',
    )


def _explain_admission(intent: Intent, message: str) -> PodwireError:
    return Unavailable(
        message,
        hint="a webhook or an admission policy of the cluster refuses what podwire writes: let it pass"
        f" {intent.rbac_name}, or tell it of the node's addresses and ranges",
    )


def _explain_never(refused: Refused, message: str) -> PodwireError:
    if _is_of_old_crd(refused):
        what = refused.status.message[refused.status.message.index(_STRICT) :]
        return Unavailable(
            f"{refused.intent}: {what}",
            hint=f"its CRD is older than this podwire: kubectl apply -f {CRD_FILES}/",
        )
    if _is_of_new_crd(refused):
        return Unavailable(
            message,
            hint="its CRD asks for what this podwire does not write: it is newer; upgrade podwire, or apply the CRDs of"
            f" this version ({CRD_FILES}/)",
        )
    if _is_admission(message):
        return _explain_admission(refused.intent, message)
    hint = "nothing was written"
    if _is_too_large(refused):
        hint = "it is larger than etcd takes; split it into several objects"
    return InvalidRequest(message, hint=hint)


def _explain_passing(refused: Refused, message: str) -> PodwireError:
    if refused.code == TOO_MANY:
        hint = "the API server has too much to do; this is tried again later"
    elif "webhook" in refused.status.message:
        hint = "an admission webhook of the cluster does not answer: repair or remove it"
    else:
        hint = "see the log of the API server"
    return Unavailable(message, hint=hint)


def _is_admission(message: str) -> bool:
    # The answer has no reason of its own for either: webhooks and admission policies are known by the words that the
    # API server puts in front of theirs.
    return "admission webhook" in message or "denied request" in message


def _is_of_old_crd(refused: Refused) -> bool:
    """Tell whether the server's schema lacks a field of ours: writes are strict (fieldValidation)."""
    return refused.intent.resource.is_own and _STRICT in refused.status.message


def _is_of_new_crd(refused: Refused) -> bool:
    """Tell whether the server's schema has a field that must be there, and that this version does not know."""
    return (
        refused.code == INVALID
        and refused.intent.resource.is_own
        and "Required value" in refused.status.message
    )


def _is_too_large(refused: Refused) -> bool:
    # The limit of etcd, below that of the API server, comes as a failure of the server with etcd's words.
    return refused.code == TOO_LARGE or "request is too large" in refused.status.message

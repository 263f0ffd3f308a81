"""Errors, by what the caller can do about them.

`kernel` turns errno into `KernelFailure`; `agent.api.routes` alone knows HTTP and `cni.errors` alone knows CNI numbers.
A message is the failed intent in lower case with its values; the hint is the next thing a person should do.
"""

import errno as errno_names

import msgspec


class Fault(msgspec.Struct, frozen=True):
    """One thing wrong with an input: where (a path like `args.cni.ips[1]`) and what."""

    path: str
    message: str
    is_mistyped: bool = False
    """The value is of another type than the field: it cannot even be read. Others can, and are not accepted."""


class PodwireError(Exception):
    """Base of all expected failures. `kind` is the stable word that logs, REST and CNI map from."""

    kind = "internal"

    def __init__(self, message: str, *, hint: str = "", faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.faults = faults

    @property
    def told(self) -> str:
        """What people are told: the message and, where there is one, the hint."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class InvalidRequest(PodwireError):
    """The request cannot be done as written; `kind` says which part of it is at fault."""

    kind = "invalid"


class InvalidEnvironment(InvalidRequest):
    """A CNI environment variable is missing, wrong or names something that is gone (CNI code 4)."""

    kind = "environment"


class UndecodableRequest(InvalidRequest):
    """The bytes are not what the format says: malformed JSON, wrong types (CNI code 6)."""

    kind = "decode"


class InvalidConfiguration(InvalidRequest):
    """The network configuration is understood and wrong (CNI code 7)."""

    kind = "configuration"


class UnsupportedField(InvalidRequest):
    """A field that we know and do not carry out (CNI code 2)."""

    kind = "unsupported-field"


class IncompatibleVersion(InvalidRequest):
    """A CNI version that we do not speak (CNI code 1)."""

    kind = "version"


class NotFound(PodwireError):
    """What was named does not exist."""

    kind = "not-found"


class Conflict(PodwireError):
    """Something else already holds the name, key or revision."""

    kind = "conflict"


class Exhausted(PodwireError):
    """No address is left (CNI code 100)."""

    kind = "exhausted"


class AddressUnavailable(PodwireError):
    """A wanted address is in use or outside the pools (CNI code 101)."""

    kind = "address"


class PolicyOverflow(PodwireError):
    """The policy does not fit the datapath; nothing was written (CNI code 102)."""

    kind = "policy-overflow"


class Unsupported(PodwireError):
    """The running kernel lacks a feature that the request needs (CNI code 103)."""

    kind = "unsupported"


class Unavailable(PodwireError):
    """Not now: overload, a store or an agent that is away (CNI code 11)."""

    kind = "unavailable"


class Cancelled(Unavailable):
    """The caller went away, or a DEL or GC of the same attachment overtook the request."""

    kind = "cancelled"


class CannotServe(PodwireError):
    """STATUS: an ADD would fail now; running pods are unaffected (CNI code 50)."""

    kind = "cannot-serve"


class Impaired(PodwireError):
    """STATUS: an ADD would fail now and running pods may be impaired (CNI code 51)."""

    kind = "impaired"


class CheckFailed(PodwireError):
    """CHECK found the kernel or the runtime's result different from the journal; `faults` name each (CNI code 104)."""

    kind = "check"


class UnknownContainer(PodwireError):
    """The attachment is not one of ours (CNI code 3)."""

    kind = "unknown-container"


class StorageFailure(PodwireError):
    """A file of ours cannot be read or written, a full disk included (CNI code 5)."""

    kind = "io"


class ForeignObject(PodwireError):
    """An object with our name carries no mark of ours; it is left alone (CNI code 110)."""

    kind = "foreign"


class NewerData(PodwireError):
    """Data on disk or in the kernel was written by a newer podwire; nothing was touched."""

    kind = "newer-data"


class Bug(PodwireError):
    """A state that the code says cannot be (CNI code 110)."""

    kind = "bug"


class KernelFailure(PodwireError):
    """A system call failed. `errno` is the number, `call` what was tried, `object` what it was tried on."""

    kind = "kernel"

    def __init__(
        self, errno: int, call: str, object_name: str, *, detail: str = "", hint: str = ""
    ) -> None:
        name = errno_names.errorcode.get(errno, str(errno))
        super().__init__(
            f"{call} {object_name!r}: {detail or name}" + (f" ({name})" if detail else ""),
            hint=hint,
        )
        self.errno = errno
        self.call = call
        self.object_name = object_name

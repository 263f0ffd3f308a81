"""The exit code for each error of the product that a command expects.

It is imported only when there is such an error.
"""

from collections.abc import Mapping

from podwire.cli.client import (
    EXIT_CONFLICT,
    EXIT_INTERNAL,
    EXIT_NOT_FOUND,
    EXIT_NOT_SO,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
)
from podwire.cni.launcher import AttachFailed
from podwire.model import errors

_OF_ERROR: Mapping[type[errors.PodwireError], int] = {
    errors.NotFound: EXIT_NOT_FOUND,
    errors.UnknownContainer: EXIT_NOT_FOUND,
    errors.Conflict: EXIT_CONFLICT,
    errors.AddressUnavailable: EXIT_CONFLICT,
    errors.ForeignObject: EXIT_CONFLICT,
    errors.NewerData: EXIT_CONFLICT,
    errors.PolicyOverflow: EXIT_CONFLICT,
    errors.InvalidRequest: EXIT_REFUSED,
    errors.Unsupported: EXIT_REFUSED,
    errors.Unavailable: EXIT_UNREACHABLE,
    errors.CannotServe: EXIT_UNREACHABLE,
    errors.Impaired: EXIT_UNREACHABLE,
    errors.Exhausted: EXIT_NOT_SO,
    errors.CheckFailed: EXIT_NOT_SO,
    errors.PodwireError: EXIT_INTERNAL,
}
"""Exit code of an error: that of its nearest class."""

_OF_CNI_CODE = {
    **dict.fromkeys((1, 2, 4, 6, 7, 103), EXIT_REFUSED),
    3: EXIT_NOT_FOUND,
    **dict.fromkeys((11, 50, 51), EXIT_UNREACHABLE),
    **dict.fromkeys((100, 104), EXIT_NOT_SO),
    **dict.fromkeys((101, 102), EXIT_CONFLICT),
}


def error_exit_code(error: errors.PodwireError) -> int:
    """Give the exit code of an error."""
    if isinstance(error, AttachFailed):
        return _OF_CNI_CODE.get(error.code, EXIT_INTERNAL)
    return next(_OF_ERROR[kind] for kind in type(error).__mro__ if kind in _OF_ERROR)

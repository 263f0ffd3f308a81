"""Fd: one open descriptor and the duty to close it.

Used wherever a descriptor outlives the function that opened it (namespaces, pidfds). Must never
guess the owner of a number: the holder of the `Fd` closes it, and `detach` hands that duty on. An `Fd`
that is dropped open warns, and tests turn warnings into errors.
"""

import os
import warnings

from podwire.model.closing import Closing


class Fd(Closing):
    """Owner of a descriptor; `what` names it in messages."""

    __slots__ = ("_number", "_what")

    def __init__(self, number: int, what: str) -> None:
        if number < 0:
            raise ValueError(f"descriptor of {what!r} must not be negative, is {number}")
        self._number = number
        self._what = what

    def __repr__(self) -> str:
        state = "closed" if self._number < 0 else str(self._number)
        return f"<Fd {self._what!r} {state}>"

    @property
    def closed(self) -> bool:
        """Tell whether the descriptor was closed or handed on."""
        return self._number < 0

    def fileno(self) -> int:
        """Give the number; raises ValueError when it is no longer ours."""
        if self._number < 0:
            raise ValueError(f"use descriptor of {self._what!r} after it was closed")
        return self._number

    def detach(self) -> int:
        """Give the number and the duty to close it to the caller."""
        number = self.fileno()
        self._number = -1
        return number

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._number >= 0:
            # Forgotten before it is closed: Linux frees the number even where close(2) fails, and another thread may
            # have it at once.
            number, self._number = self._number, -1
            os.close(number)

    def __del__(self) -> None:
        if getattr(self, "_number", -1) >= 0:
            warnings.warn(
                f"descriptor dropped open: {self!r}", ResourceWarning, stacklevel=2, source=self
            )
            self.close()

"""What is closed at the end of a `with` statement."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Base of what holds a resource and gives it back in `close`."""

    @abstractmethod
    def close(self) -> None:
        """Give the resource back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

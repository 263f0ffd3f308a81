"""Say in one way how something in the kernel differs from what is wanted.

Used by what compares devices. Pure.
"""

from collections.abc import Mapping


def list_differences(what: str, settings: Mapping[str, tuple[object, object]]) -> list[str]:
    """Name the settings of a device, each given as (found, wanted), that are not as wanted."""
    return [
        f"{what}: {name} is {found!r}, wanted {wanted!r}"
        for name, (found, wanted) in settings.items()
        if found != wanted
    ]

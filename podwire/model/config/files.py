"""The agent's configuration file: found, read and merged with the other sources.

Called by the doors: by the agent for itself, and by `podwire cleanup` for an agent that does not run. Environment and
host name are handed in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from podwire.model.config.sources import (
    CONFIG_FILE_MAX_BYTES,
    DEFAULT_CONFIG_FILE,
    Arguments,
    Settled,
    settle,
)
from podwire.model.errors import InvalidConfiguration

CONFIG_VARIABLE: Final = "PODWIRE_CONFIG"


def settle_from_file(parsed: Arguments, environment: Mapping[str, str], host_name: str) -> Settled:
    """Read the file and merge; raises InvalidConfiguration with every fault. A named file must be there."""
    named = parsed.config or environment.get(CONFIG_VARIABLE)
    path = Path(named or DEFAULT_CONFIG_FILE)
    text = ""
    try:
        raw = path.read_bytes()
        if len(raw) > CONFIG_FILE_MAX_BYTES:
            raise InvalidConfiguration(
                f"read settings {str(path)!r}: larger than {CONFIG_FILE_MAX_BYTES} bytes"
            )
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        # Without the file at the default place all settings have their defaults. A file that was named has to be
        # there.
        if named or not isinstance(error, FileNotFoundError):
            raise InvalidConfiguration(
                f"read settings {str(path)!r}: {getattr(error, 'strerror', None) or error}",
                hint="name the file with --config FILE; docs/configuration.md lists its keys",
            ) from error
    return settle(
        host_name=host_name,
        arguments=parsed,
        environment=environment,
        text=text,
        file_name=str(path),
    )

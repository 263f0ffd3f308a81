"""The settings in force, and how some of them change while the agent runs.

SIGHUP reads file, environment and flags again; `PATCH /config` names values. Either all of a change is valid or none
of it is applied. Only reloadable keys change. When another key differs, PATCH refuses it and SIGHUP warns: "needs a
restart".
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from podwire.model.config import SETTINGS, AgentConfig
from podwire.model.config.files import settle_from_file
from podwire.model.config.sources import Arguments, Settled, raise_faults, read_value
from podwire.model.errors import Fault, PodwireError

Apply = Callable[[AgentConfig], None]
FOUND = "this node and its cluster"
"""The source of a value that the agent has found by itself."""

_log = logging.getLogger(__name__)


def read_settings(parsed: Arguments) -> Settled:
    """Read file and environment; raises InvalidConfiguration with every fault. A named file must be there."""
    return settle_from_file(parsed, os.environ, socket.gethostname())


class LiveConfig:
    """Settings of a running agent. `found`: what node and cluster say in the place of keys that no source sets."""

    def __init__(
        self,
        settled: Settled,
        found: Mapping[str, object] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._found = dict(found or {})
        sources = {**settled.sources, **dict.fromkeys(self._found, FOUND)}
        config = settled.config.replace(self._found)
        self._settled = Settled(config, sources, settled.warnings)
        self._appliers: dict[str, Apply] = {}
        """What a changed key sets in motion."""

    @property
    def current(self) -> AgentConfig:
        """The settings in force."""
        return self._settled.config

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each value that is no default came from."""
        return self._settled.sources

    def apply_with(self, key: str, apply: Apply) -> None:
        """Call `apply` with the new settings whenever `key` changes."""
        self._appliers[key] = apply

    def patch(self, changes: Mapping[str, Any]) -> None:
        """Apply values that an API caller named; InvalidConfiguration names every fault and changes nothing."""
        faults: list[Fault] = []
        values: dict[str, object] = {}
        for key, raw in changes.items():
            try:
                values[key] = self._read(key, raw)
            except ValueError as error:
                faults.append(Fault(key, str(error)))
        if faults:
            raise_faults("change the agent's settings", faults)
        self._apply(values, "PATCH /v1/config")

    def reload(self, settle: Callable[[], Settled]) -> None:
        """Apply what the sources say now. A source that is wrong changes nothing and is logged."""
        try:
            fresh = settle().config
        except PodwireError as error:
            _log.error(
                "reload settings failed; all stay as they are", extra={"error": error.message}
            )
            return
        # Sources are read again, the node and its cluster are not: what they said stays where no source says otherwise.
        fresh = fresh.replace(
            {key: value for key, value in self._found.items() if not fresh.get(key)}
        )
        differing = [key for key in SETTINGS if fresh.get(key) != self.current.get(key)]
        fixed = [key for key in differing if not SETTINGS[key].reloadable]
        if fixed:
            _log.warning("changed settings need a restart", extra={"keys": ",".join(fixed)})
        self._apply(
            {key: fresh.get(key) for key in differing if SETTINGS[key].reloadable}, "reload"
        )

    def _read(self, key: str, raw: Any) -> object:
        if key not in SETTINGS:
            raise ValueError("is not a setting")
        if not SETTINGS[key].reloadable:
            raise ValueError("needs a restart: change it in the configuration file")
        return read_value(SETTINGS[key], raw)

    def _apply(self, values: Mapping[str, object], source: str) -> None:
        with self._lock:
            before = self.current
            changed = {key: value for key, value in values.items() if before.get(key) != value}
            config = before.replace(changed)
            # The effects come first: when one fails, `current` is what it was, and the same change can be tried again.
            for key in changed:
                if key in self._appliers:
                    self._appliers[key](config)
            sources = {**self.sources, **dict.fromkeys(changed, source)}
            self._settled = Settled(config, sources, ())
        for key, value in changed.items():
            _log.info("changed a setting", extra={"key": key, "value": value, "cause": source})

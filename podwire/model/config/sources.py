"""Settings from their sources: flag beats `PODWIRE_*` variable beats file beats default.

Called by `agent.main` and by the reload. Collects all faults before it raises, each with value,
field and source, because a person who fixes one fault per attempt gives up. Reads nothing itself:
text, variables and arguments are handed in.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podwire.model.config import IN_KUBERNETES, SETTINGS, AgentConfig, find_contradictions
from podwire.model.config.settings import ENVIRONMENT_PREFIX, Kind, Setting, show
from podwire.model.errors import Fault, InvalidConfiguration

DEFAULT_CONFIG_FILE = Path("/etc/podwire/agent.toml")
CONFIG_FILE_MAX_BYTES = 1 << 20
FLAG_CONFIG = "--config"
_OTHER_VARIABLES = frozenset({"PODWIRE_CONFIG", "PODWIRE_AGENT", "PODWIRE_LAB"})
"""Variables of the command line tool and the configuration file's name: known, and no settings."""


@dataclass(frozen=True)
class Value:
    """A value on its way: what was said, where, and how it reads there."""

    raw: Any
    source: str
    shown: str


@dataclass
class Arguments:
    """The command line, taken apart."""

    config: Path | None = None
    wants_help: bool = False
    wants_version: bool = False
    values: dict[str, Value] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class Settled:
    """A valid configuration, where each value came from, and what to warn of."""

    config: AgentConfig
    sources: Mapping[str, str]
    warnings: Sequence[str]


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Take the agent's command line apart: `--key value` or `--key=value`; a boolean may stand alone."""
    parsed = Arguments()
    flags = {row.flag: row for row in SETTINGS.values()}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            parsed.wants_help = True
        elif word == "--version":
            parsed.wants_version = True
        elif name != FLAG_CONFIG and name not in flags:
            parsed.faults.append(Fault("", _unknown("flag", name, [FLAG_CONFIG, *flags])))
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)
        else:
            text = value if equals else _next_word(flags.get(name), rest)
            _keep_argument(parsed, name, flags.get(name), text)
    return parsed


def _next_word(row: Setting | None, rest: list[str]) -> str | None:
    if row is not None and row.kind.name == "boolean" and (not rest or rest[0].startswith("--")):
        return "true"
    return rest.pop(0) if rest else None


def _keep_argument(parsed: Arguments, name: str, row: Setting | None, text: str | None) -> None:
    if text is None:
        parsed.faults.append(Fault(name, "flag needs a value"))
    elif row is None:
        parsed.config = Path(text)
    else:
        parsed.values[row.key] = _from_text(row.kind, text, f"flag {name}")


def settle(
    *,
    host_name: str,
    arguments: Arguments | None = None,
    environment: Mapping[str, str] | None = None,
    text: str = "",
    file_name: str = "",
) -> Settled:
    """Merge the sources into a valid configuration, or raise InvalidConfiguration: every fault."""
    parsed = arguments or Arguments()
    faults = list(parsed.faults)
    from_file = _read_file(text, file_name, faults)
    from_environment, warnings = _read_environment(environment or {})
    said = {**from_file, **from_environment, **parsed.values}
    values, sources = _check_values(said, faults)
    values.setdefault("node_name", host_name)
    state_dir = values.get("state_dir", SETTINGS["state_dir"].default)
    values.setdefault("store", f"sqlite://{state_dir}/store.db")
    config = AgentConfig().replace(values)
    if config.store.is_kubernetes:
        config = AgentConfig().replace({**IN_KUBERNETES, **values})
    # The host's name need not be the node's, and an agent of another name would serve a node that is not its own.
    if config.store.is_kubernetes and not config.store.kubeconfig and "node_name" not in sources:
        told = "is not set, and a pod cannot know it: pass spec.nodeName as PODWIRE_NODE_NAME (see deploy/podwire.yaml)"
        faults.append(Fault("node_name", told))
    # Contradictions between settings are looked for only among valid values: of an invalid one the default would be
    # compared, which nobody wrote.
    if not faults:
        faults.extend(_place(fault, sources) for fault in find_contradictions(config))
    if faults:
        raise_faults("read the agent's settings", faults)
    return Settled(config, sources, warnings)


def raise_faults(intent: str, faults: Sequence[Fault]) -> None:
    """Raise InvalidConfiguration that names all of them."""
    listed = "; ".join(f"{fault.path} {fault.message}".strip() for fault in faults)
    raise InvalidConfiguration(
        f"{intent}: {listed}",
        hint="correct them; docs/configuration.md and `podwire-agent --help` list every key",
        faults=tuple(faults),
    )


def read_value(row: Setting, raw: Any) -> Any:
    """Turn what a source said into a value of `row`; ValueError ends the sentence "KEY ..."."""
    value = row.kind.read(raw)
    if row.built is not None and not row.built(value):
        raise ValueError(f"requests what is not built yet: this version takes {row.built_note}")
    return value


def _check_values(
    said: Mapping[str, Value], faults: list[Fault]
) -> tuple[dict[str, object], dict[str, str]]:
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for key, value in said.items():
        try:
            values[key] = read_value(SETTINGS[key], value.raw)
            sources[key] = value.source
        except ValueError as error:
            faults.append(Fault(key, f"= {value.shown} ({value.source}) {error}"))
    return values, sources


def _read_file(text: str, name: str, faults: list[Fault]) -> dict[str, Value]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        faults.append(Fault(name, f"is not valid TOML: {error}"))
        return {}
    values = {}
    for key, raw in document.items():
        if key in SETTINGS:
            values[key] = Value(raw, f"file {name}", _show_raw(raw))
        else:
            faults.append(Fault("", _unknown("key", key, SETTINGS) + f" (file {name})"))
    return values


def _read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Value], list[str]]:
    names = {row.environment: row for row in SETTINGS.values()}
    values: dict[str, Value] = {}
    warnings: list[str] = []
    for name in sorted(environment):
        if name in names:
            row = names[name]
            values[row.key] = _from_text(row.kind, environment[name], f"environment {name}")
        elif name.startswith(ENVIRONMENT_PREFIX) and name not in _OTHER_VARIABLES:
            warnings.append(_unknown("variable", name, names))
    return values, warnings


def _from_text(kind: Kind, text: str, source: str) -> Value:
    return Value(kind.from_text(text), source, repr(text))


def _place(fault: Fault, sources: Mapping[str, str]) -> Fault:
    return Fault(fault.path, f"({sources.get(fault.path, 'default')}) {fault.message}")


def _show_raw(raw: object) -> str:
    return show(tuple(raw)) if isinstance(raw, list) else show(raw)


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, cutoff=0.8)
    return f"unknown {what} {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")

"""The settings for people to read: the text of `--help` and docs/configuration.md, from the one
table.

Called by `agent.main` and `scripts/generate-docs`; a test compares the page. Pure.
"""

import textwrap
from collections.abc import Iterator

from podwire.model.config import GROUP_OF, GROUP_TITLES, SETTINGS
from podwire.model.config.settings import Setting, show
from podwire.model.config.sources import DEFAULT_CONFIG_FILE

_HELP_WIDTH = 96

_USAGE = f"""\
Usage: podwire-agent [--config FILE] [--KEY VALUE]...

The agent of one node: serves CNI and the API, keeps the datapath. Runs in the foreground, logs to
stderr. SIGTERM stops it and leaves running pods connected; SIGHUP reads the reloadable keys again.

Example:
  podwire-agent --config /etc/podwire/agent.toml --log-level debug

  -h, --help          this text
  --version           version
  --config FILE       TOML file (default {DEFAULT_CONFIG_FILE}; PODWIRE_CONFIG)
"""

_PAGE = f"""\
# Settings of the agent

`podwire-agent --config FILE` reads a TOML file (default `{DEFAULT_CONFIG_FILE}`, which may be
absent; `PODWIRE_CONFIG` names another one). Each key is also a flag and an environment
variable: `node_name` = `--node-name` = `PODWIRE_NODE_NAME`. A flag beats the environment, the
environment beats the file, the file beats the default. Lists are separated by commas in flags
and variables. An unknown key or flag is refused; an unknown `PODWIRE_*` variable is warned of,
because Kubernetes injects such names.

`SIGHUP` and `PATCH /v1/config` change the keys marked *reload* in a running agent; a change of any
other key needs a restart, which no running pod notices. A key whose capability this version does
not have is known and accepted only at the values listed: the agent refuses what it would not do.

This page is generated from `podwire/model/config/__init__.py` by `scripts/generate-docs`.
"""


def help_text() -> str:
    """Give what `podwire-agent --help` prints."""
    lines = [_USAGE]
    for group, rows in _by_group():
        lines.append(f"{GROUP_TITLES[group]}:")
        for row in rows:
            lines.append(f"  {row.flag} VALUE")
            about = f"{row.help} {_capital(row.kind.name)}; default {_default(row)}."
            if row.built_note:
                about += f" This version: {row.built_note}."
            lines.append(textwrap.indent(textwrap.fill(about, _HELP_WIDTH - 6), "      "))
        lines.append("")
    return "\n".join(lines)


def markdown() -> str:
    """Give docs/configuration.md."""
    lines = [_PAGE]
    for group, rows in _by_group():
        lines += [f"## {GROUP_TITLES[group]}", ""]
        lines += ["| key | type | default | what it does |", "|---|---|---|---|"]
        for row in rows:
            about = row.help
            if row.built_note:
                about += f" This version takes {row.built_note}."
            if row.reloadable:
                about += " *reload*"
            default = row.default_note or f"`{_default(row)}`"
            lines.append(f"| `{row.key}` | {row.kind.name} | {default} | {about} |")
        lines.append("")
    return "\n".join(lines)


def _by_group() -> Iterator[tuple[str, list[Setting]]]:
    for group in GROUP_TITLES:
        yield group, [row for key, row in SETTINGS.items() if GROUP_OF[key] == group]


def _default(row: Setting) -> str:
    return row.default_note.replace("`", "") or show(row.default)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:].replace("`", "")

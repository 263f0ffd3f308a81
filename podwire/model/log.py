"""What log lines look like, and which facts they may carry.

`agent.main` installs one handler. All other modules use `logging.getLogger(__name__)` with a constant message and
`extra={...}` whose names are in FIELDS (a test reads every call). An error is logged once, where it stops. A record is
one line, whatever a container's name contains. Never logs secrets or packet contents.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

ROOT_LOGGER = "podwire"

FIELDS: Mapping[str, str] = {
    "container": "container id",
    "network": "network name of a CNI configuration",
    "pod": "namespace/name",
    "endpoint": "number of the endpoint",
    "identity": "number of the identity",
    "iface": "interface name",
    "address": "IP address or prefix",
    "op": "operation: a CNI command or an HTTP method",
    "step": "step of an operation",
    "ms": "duration in milliseconds",
    "code": "code of an answer: CNI or HTTP",
    "old": "what it was before",
    "new": "what it is now",
    "cause": "why it happened",
    "error": "message of a failure",
    "hint": "what a person should do next",
    "path": "file, socket or API path",
    "key": "setting",
    "keys": "names, where there are several",
    "value": "value of a setting",
    "signal": "signal that was received",
    "count": "how many",
    "reason": "drop reason or cause word",
    "task": "name of an agent's task",
    "pid": "process id",
    "object": "object of the store",
    "node": "name of a node",
    "version": "version of podwire or of a format",
    "seed": "seed of a random sequence",
}
"""Every fact that a line may carry: name -> what it is."""

_ENCODE = json.JSONEncoder(ensure_ascii=True, default=str).encode
"""Made once: `json.dumps` makes an encoder for each call that has settings."""
_LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@+,%#[]()*")


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """Give the facts of a line, in the order of FIELDS."""
    return {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}


def format_time(created_s: float) -> str:
    """Write a Unix time as RFC 3339 in UTC with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s))
    return f"{whole}.{int(created_s * 1000) % 1000:03d}Z"


class TextFormatter(logging.Formatter):
    """`TIME LEVEL message name=value ...`; values with anything but plain characters are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line, a traceback after it if there is one."""
        words = [format_time(record.created), f"{record.levelname:<7}", record.getMessage()]
        words += [f"{name}={_quote(value)}" for name, value in facts(record).items()]
        if record.levelno <= logging.DEBUG:
            words.append(f"logger={record.name}")
        line = " ".join(words)
        return line + "\n" + self.formatException(record.exc_info) if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time`, `level`, `logger`, `message`, then the facts."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        document: dict[str, Any] = {
            "time": format_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts(record),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return _ENCODE(document)


def configure(level: str, form: str, stream: TextIO | None = None) -> logging.Handler:
    """Send the lines of podwire to `stream` (stderr) in `form`; replaces what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in (ROOT_LOGGER, "asyncio", "aiohttp"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("aiohttp").setLevel("WARNING")
    set_level(level)
    # No line says where in the code it comes from, or on which thread: finding out is half of its cost.
    logging._srcfile = None  # Logging HOWTO, "Optimization"
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # A full disk or a closed pipe under stderr must not turn every log line into a traceback.
    logging.raiseExceptions = False
    return handler


def set_level(level: str) -> None:
    """Set the least severe level that is logged: debug, info, warning or error."""
    logging.getLogger(ROOT_LOGGER).setLevel(_LEVELS[level])


def _quote(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=True)

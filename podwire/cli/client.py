"""The client of the API socket: one request per connection, JSON back.

Used by every command that talks to an agent. It speaks HTTP without a library, because importing one would take longer
than a list. Errors become CliError with the exit code of the contract: 3 unreachable, 4 not found, 5 conflict, 6
refused, 70 internal.
"""

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

EXIT_NOT_SO = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_FOUND = 4
EXIT_CONFLICT = 5
EXIT_REFUSED = 6
EXIT_INTERNAL = 70

_EXIT_BY_STATUS = {
    **dict.fromkeys((400, 405, 413, 501), EXIT_REFUSED),
    404: EXIT_NOT_FOUND,
    409: EXIT_CONFLICT,
    **dict.fromkeys((408, 429, 503), EXIT_UNREACHABLE),
}
_TIMEOUT_S = 30.0
_HEAD_MAX_BYTES = 65_536


class CliError(Exception):
    """What a command ends with: exit code, what failed, what to do."""

    def __init__(self, exit_code: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message
        self.hint = hint


def request(path: str, method: str, resource: str, body: Any = None) -> Any:
    """Do one request on the agent's socket at `path`; gives the decoded body, text if it is not JSON."""
    with _open(path) as connection:
        reader = _send(connection, path, method, resource, body)
        with reader:
            status, headers = _read_head(reader, path)
            try:
                document = _decode(_read_body(reader, headers), headers)
            except (OSError, ValueError) as error:
                raise _unreachable(path, error) from error
    if status >= 400:
        raise _refusal(status, document)
    return document


def stream(path: str, resource: str, query: Mapping[str, Any]) -> Iterator[Any]:
    """Give the documents of a JSON-lines resource as they come, until the agent ends; CliError when it is gone."""
    from urllib.parse import quote, urlencode  # noqa: PLC0415 (start-up time)

    wanted = {key: value for key, value in query.items() if value is not None}
    if wanted:
        resource += "?" + urlencode(wanted, quote_via=quote)
    with (
        _open(path) as connection,
        _send(connection, path, "GET", resource, None) as reader,
    ):
        status, headers = _read_head(reader, path)
        if status >= 400:
            raise _refusal(status, _decode(_read_body(reader, headers), headers))
        # Events may be hours apart. Until the head of the answer was read, the usual timeout held.
        connection.settimeout(None)
        try:
            for line in _lines(_chunks(reader, headers)):
                yield json.loads(line)
        except (OSError, ValueError) as error:
            raise _unreachable(path, error) from error


def segment(text: str) -> str:
    """Write text as one segment of a path."""
    from urllib.parse import quote  # noqa: PLC0415 (start-up time)

    return quote(text, safe=":")


def _open(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise _unreachable(path, error) from error
    return connection


def _send(connection: socket.socket, path: str, method: str, resource: str, body: Any) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    # "Connection: close" makes the end of the connection the end of an answer without a length (RFC 9112, section
    # 6.3).
    head = (
        f"{method} /v1{resource} HTTP/1.1\r\nHost: podwire\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        connection.sendall(head.encode() + data)
    except OSError as error:
        raise _unreachable(path, error) from error
    return connection.makefile("rb")


def _read_head(reader: Any, path: str) -> tuple[int, dict[str, str]]:
    try:
        first = reader.readline(_HEAD_MAX_BYTES).split()
        headers: dict[str, str] = {}
        while (line := reader.readline(_HEAD_MAX_BYTES).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return int(first[1]), headers
    except (OSError, IndexError, ValueError) as error:
        raise _unreachable(path, error) from error


def _read_body(reader: Any, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return b"".join(_chunks(reader, headers))
    if "content-length" in headers:
        length = int(headers["content-length"])
        data = bytes(reader.read(length))
        # `read` gives less only at the end of the connection. A list that is cut short must not pass for a whole one.
        if len(data) < length:
            raise ConnectionResetError("the agent ended in the middle of its answer")
        return data
    return bytes(reader.read())


def _chunks(reader: Any, headers: Mapping[str, str]) -> Iterator[bytes]:
    """Give the parts of a body as they come; ConnectionError when it breaks off."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        while data := reader.read1(65_536):
            yield data
        return
    while line := reader.readline(_HEAD_MAX_BYTES):
        # A chunk's size may be followed by extensions (RFC 9112, section 7.1.1).
        size = int(line.split(b";")[0], 16)
        data = reader.read(size)
        if not size:
            return
        if len(data) < size:
            break
        yield data
        reader.readline(_HEAD_MAX_BYTES)
    raise ConnectionResetError("the agent ended in the middle of its answer")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)


def _decode(data: bytes, headers: Mapping[str, str]) -> Any:
    if "json" in headers.get("content-type", "") and data:
        return json.loads(data)
    return data.decode(errors="replace")


def _refusal(status: int, document: Any) -> CliError:
    error = document.get("error", {}) if isinstance(document, dict) else {}
    message = str(error.get("message") or f"the agent answered {status}")
    for fault in error.get("faults") or ():
        line = f"{fault.get('path', '')} {fault.get('message', '')}".strip()
        if line not in message:
            message += f"; {line}"
    exit_code = _EXIT_BY_STATUS.get(status, EXIT_INTERNAL)
    return CliError(exit_code, message, str(error.get("hint", "")))


def _unreachable(path: str, error: Exception) -> CliError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    hint = (
        "the socket is only for root: run the command as root"
        if isinstance(error, PermissionError)
        else "is podwire-agent running? --agent names another socket, --lab and --node a lab's node"
    )
    return CliError(EXIT_UNREACHABLE, f"reach the agent at {path}: {reason}", hint)

"""nftables: transactions as text, through libnftables in this process, or through `nft` where it is missing.

Used by `datapath.masquerade` and `datapath.host`. The context is bound to the namespace of the thread that opened it
and stays open: closing one waits for an RCU grace period. Must never report half a success: the kernel applies a
command text whole or not at all, and its error text is in the exception.
"""

import ctypes
import errno
import json
import threading
from typing import Any, Final

from podwire.kernel.spawn import run
from podwire.model.closing import Closing
from podwire.model.errors import KernelFailure, Unsupported

_LIBRARY: Final = "libnftables.so.1"
_OUTPUT_JSON: Final = 1 << 4
_COMMAND: Final = "nft"
_TIMEOUT_S: Final = 30.0
_SAID: Final = {
    errno.ENOENT: "No such file or directory",
    errno.EEXIST: "File exists",
    errno.EPERM: "Operation not permitted",
    errno.EBUSY: "Device or resource busy",
    errno.EOPNOTSUPP: "not supported",
}


class Nftables(Closing):
    """A long-lived context; one command at a time (it locks itself)."""

    def __init__(self, *, in_process: bool = True) -> None:
        self._lock = threading.Lock()
        self._context: int | None = None
        self._library = _load_library() if in_process else None
        if self._library is not None:
            # libnftables opens its netlink socket here, which binds the context to this thread's namespace.
            self._context = self._library.nft_ctx_new(0)
            if not self._context:
                raise KernelFailure(errno.ENOMEM, "open", "nftables")
            # Buffered, or libnftables would print to the agent's own output.
            self._library.nft_ctx_buffer_output(self._context)
            self._library.nft_ctx_buffer_error(self._context)

    @property
    def in_process(self) -> bool:
        """Tell whether commands run in this process (0.15 ms) or in one of their own (16 ms)."""
        return self._context is not None

    def close(self) -> None:
        """Close the context; a second call does nothing."""
        if self._library is not None and self._context:
            context, self._context = self._context, None
            self._library.nft_ctx_free(context)

    def run(self, commands: str) -> None:
        """Apply commands as one transaction; KernelFailure carries what nftables says."""
        self._call(commands, as_json=False)

    def list_json(self, command: str) -> list[dict[str, Any]]:
        """Run a `list` command and give the objects it prints, without the leading version."""
        text = self._call(command, as_json=True)
        if not text.strip():
            return []
        return [item for item in json.loads(text)["nftables"] if "metainfo" not in item]

    def _call(self, commands: str, *, as_json: bool) -> str:
        with self._lock:
            if self._library is None:
                return _call_command(commands, as_json=as_json)
            if self._context is None:
                raise ValueError("use nftables after it was closed")
            flags = _OUTPUT_JSON if as_json else 0
            # The flags stay in the context: a transaction after a listing would answer in JSON.
            self._library.nft_ctx_output_set_flags(self._context, flags)
            status = self._library.nft_run_cmd_from_buffer(self._context, commands.encode())
            output = self._library.nft_ctx_get_output_buffer(self._context) or b""
            errors = self._library.nft_ctx_get_error_buffer(self._context) or b""
        if status != 0:
            raise _failure(commands, errors.decode(errors="replace"))
        return str(output.decode())


def _load_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    # ctypes takes every result for an int of 32 bits unless told otherwise, which would cut the pointers.
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_ctx_free.argtypes = [ctypes.c_void_p]
    library.nft_ctx_free.restype = None
    for name in ("nft_ctx_buffer_output", "nft_ctx_buffer_error"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_char_p
    library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.nft_ctx_output_set_flags.restype = None
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return library


def _call_command(commands: str, *, as_json: bool) -> str:
    # With -j, a text on standard input prints nothing: what is listed must be an argument.
    arguments = [_COMMAND, *(["-j", commands] if as_json else ["-f", "-"])]
    try:
        done = run(arguments, input_bytes=commands.encode(), timeout_s=_TIMEOUT_S)
    except KernelFailure as failure:
        if failure.errno != errno.ENOENT:
            raise
        raise Unsupported(
            "run nftables: neither its library nor its command is installed",
            hint="install the package nftables",
        ) from failure
    if done.status != 0:
        raise _failure(commands, done.stderr.decode(errors="replace"))
    return done.stdout.decode()


def _failure(commands: str, text: str) -> KernelFailure:
    first = next((line for line in text.splitlines() if line.strip()), "no reason given")
    # libnftables gives its caller -1 and a text; the errno exists in that text only.
    number = next((number for number, said in _SAID.items() if said in text), errno.EINVAL)
    return KernelFailure(
        number, "apply nftables commands", commands.strip().splitlines()[0], detail=first.strip()
    )

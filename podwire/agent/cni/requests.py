"""One CNI request from its frame to its reply: decode, dispatch, encode, log.

Called by `agent.cni.socket`. Knows no limits and no order (`agent.cni.dispatch`) and decides nothing
(`control.attach`). What went well is answered by the thread that did it: one turn of the loop less to wait for.
Invariants: whatever happens, there is exactly one reply, with the code that the specification
requires. The descriptors are closed when nothing uses them any more. An error is logged here, once.
"""

import asyncio
import fcntl
import json
import logging
import os
from dataclasses import dataclass
from time import monotonic
from typing import Final

from podwire.agent.cni.chained_portmap import ChainedPortmap
from podwire.agent.cni.dispatch import Dispatcher
from podwire.agent.cni.received import Received
from podwire.agent.metrics import Metrics
from podwire.cni.errors import code_of, encode_error
from podwire.cni.netconf import decode_request
from podwire.cni.result import encode_result
from podwire.model.errors import (
    Bug,
    InvalidEnvironment,
    InvalidRequest,
    PodwireError,
    UnsupportedField,
)
from podwire.model.interfaces import PodNamespace
from podwire.model.request import AttachRequest, AttachResult
from podwire.model.wire import IPAM_PROGRAM, Frame, Reply, ReplyStatus

NETWORKS_REMEMBERED: Final = 1024
INLINE_MAX_BYTES: Final = 65_536
"""A larger configuration is decoded on a thread: it would hold the loop up."""
_NS_GET_NSTYPE: Final = 0xB703
_CLONE_NEWNET: Final = 0x40000000

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class CniRequests:
    """Answers requests with the help of one dispatcher."""

    dispatcher: Dispatcher
    metrics: Metrics
    chained: ChainedPortmap

    def __post_init__(self) -> None:
        self._own_netns = os.stat("/proc/self/ns/net").st_ino
        self._networks_seen: set[str] = set()
        self._prompt: Received | None = None
        """What is carried out at once."""

    def do_at_once(self, received: Received) -> bool:
        """Carry an ADD or a DEL out on this thread, answer it and close its descriptors.

        False, and nothing was done: it may have to wait, and is for `answer`.
        """
        begin_s = monotonic()
        frame = received.frame
        if len(frame.stdin) > INLINE_MAX_BYTES:
            return False
        self._prompt = received
        try:
            request = decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)
            if self.chained.has(request):
                return False
            self._note_unknown_keys(request)
            namespace = self._read_namespace(received, request)

            def answer(result: AttachResult | None) -> None:
                received.answer_at_once(Reply(ReplyStatus.DONE, _encode_result(request, result)))
                # Here, so that it comes before other threads hear of an ADD: these would take the processor on which
                # the launcher is about to end.
                self.metrics.observe_request(frame.command, "ok", monotonic() - begin_s)
                self._log_done(request, _elapsed_ms(begin_s))

            if not self.dispatcher.do_at_once(request, namespace, received.caller, answer):
                return False
        except PodwireError as error:
            received.answer_at_once(self._refuse(frame, error, begin_s))
        except Exception as error:  # the door: whatever it is, the runtime gets an answer
            received.answer_at_once(self._refuse_for_bug(frame, error, begin_s))
        finally:
            self._prompt = None
        received.close()
        return True

    def end_late(self) -> None:
        """Tell what is carried out at once, and who waits for it, that its time is over, when it is."""
        prompt, refusal = self._prompt, self.dispatcher.end_late()
        if prompt is not None and refusal is not None:
            prompt.answer_at_once(_refuse(prompt.frame, refusal))

    async def answer(self, received: Received) -> Reply | None:
        """Carry a request out and give its reply, None when it was sent already; closes the descriptors."""
        begin_s = monotonic()
        frame = received.frame
        reply: Reply | None = None
        handed_over = is_answered = False

        def answer_at_once(result: AttachResult | None) -> None:
            nonlocal is_answered
            done = Reply(ReplyStatus.DONE, _encode_result(request, result))
            is_answered = received.answer_at_once(done)

        try:
            if frame.program == IPAM_PROGRAM:
                return _answer_as_ipam(frame)
            request = await self._decode(frame)
            self._note_unknown_keys(request)
            namespace = self._read_namespace(received, request)
            if self.chained.has(request):
                await asyncio.to_thread(self.chained.end, request, frame, received.mntns_fd)
            # From here on the dispatcher closes the descriptors: a thread may use them for longer than the answer
            # takes.
            handed_over = True
            result = await self.dispatcher.submit(
                request, namespace, received.caller, received.close, answer_at_once
            )
            if not is_answered:
                reply = Reply(ReplyStatus.DONE, _encode_result(request, result))
            self.metrics.observe_request(frame.command, "ok", monotonic() - begin_s)
            if is_answered:
                self._log_done(request, _elapsed_ms(begin_s))
            else:
                # Behind the answer, which goes out before the loop turns.
                asyncio.get_running_loop().call_soon(self._log_done, request, _elapsed_ms(begin_s))
        except PodwireError as error:
            reply = self._refuse(frame, error, begin_s)
        except Exception as error:  # the door: whatever it is, the runtime gets an answer
            reply = self._refuse_for_bug(frame, error, begin_s)
        finally:
            if not handed_over:
                received.close()
        return reply

    def _refuse(self, frame: Frame, error: PodwireError, begin_s: float) -> Reply:
        self._log_failed(frame, error, begin_s)
        self.metrics.observe_request(frame.command, error.kind, monotonic() - begin_s)
        return _refuse(frame, error)

    def _refuse_for_bug(self, frame: Frame, error: Exception, begin_s: float) -> Reply:
        _log.exception("a request met a bug", extra={"op": frame.command})
        self.metrics.observe_request(frame.command, Bug.kind, monotonic() - begin_s)
        return _refuse(frame, Bug(f"answer the request: {type(error).__name__}: {error}"))

    async def _decode(self, frame: Frame) -> AttachRequest:
        call = (frame.environment, frame.stdin, frame.started_boottime_ns)
        if len(frame.stdin) <= INLINE_MAX_BYTES:
            return decode_request(*call)
        return await asyncio.to_thread(decode_request, *call)

    def _read_namespace(self, received: Received, request: AttachRequest) -> PodNamespace | None:
        """Look at the descriptor; only ADD needs it to be usable."""
        frame, fd = received.frame, received.netns_fd
        fault, inode = "", 0
        # Only ADD needs the namespace. CNI specification, DEL: "Plugins should generally complete a DEL action
        # without error even if some resources are missing"; the namespace often is.
        if fd is None:
            fault = os.strerror(frame.netns_errno) if frame.netns_errno else "it is empty"
        elif not _is_network_namespace(fd):
            fault = "it is not a network namespace"
        # With the node's own namespace for a pod's, addresses and routes of the pod would be set on the node.
        elif (inode := os.fstat(fd).st_ino) == self._own_netns:
            fault = "it is the node's own network namespace"
        if fault and request.command == "ADD":
            raise InvalidEnvironment(
                f"open CNI_NETNS {request.netns_path!r}: {fault}",
                hint="the runtime must keep the pod's namespace there until ADD has answered",
            )
        if fd is None or fault:
            return None
        return PodNamespace(fd, request.netns_path, inode)

    def _note_unknown_keys(self, request: AttachRequest) -> None:
        """Say once for each network which keys of its configuration mean nothing to us."""
        if not request.unknown_keys or request.network in self._networks_seen:
            return
        # Names come from whoever may call: remembering all of them would grow without bound.
        if len(self._networks_seen) < NETWORKS_REMEMBERED:
            self._networks_seen.add(request.network)
            _log.info(
                "the network configuration has keys that mean nothing here",
                extra={"network": request.network, "keys": ", ".join(request.unknown_keys)},
            )

    def _log_done(self, request: AttachRequest, ms: float) -> None:
        level = logging.INFO if request.command in ("ADD", "DEL", "GC") else logging.DEBUG
        facts: dict[str, object] = {"op": request.command, "network": request.network}
        if request.key is not None:
            facts |= {"container": request.key.container_id, "iface": request.key.if_name}
        _log.log(level, "done", extra=facts | {"ms": ms})

    def _log_failed(self, frame: Frame, error: PodwireError, begin_s: float) -> None:
        _log.error(
            "a CNI request failed",
            extra={
                "op": frame.command,
                "container": frame.environment.get("CNI_CONTAINERID", ""),
                "iface": frame.environment.get("CNI_IFNAME", ""),
                "code": code_of(error),
                "error": error.message,
                "hint": error.hint,
                "ms": _elapsed_ms(begin_s),
            },
        )


def _elapsed_ms(begin_s: float) -> float:
    return round((monotonic() - begin_s) * 1000, 3)


def _encode_result(request: AttachRequest, result: AttachResult | None) -> bytes:
    return b"" if result is None else encode_result(request.cni_version, result)


def _refuse(frame: Frame, error: PodwireError) -> Reply:
    """Give the error in the asked version; a DEL that is right but cannot be done now is spooled."""
    later = frame.command == "DEL" and not isinstance(error, InvalidRequest)
    # NOT_NOW has the launcher write the DEL down. A request that is wrong would be as wrong at each replay.
    status = ReplyStatus.NOT_NOW if later else ReplyStatus.FAILED
    return Reply(status, encode_error(_asked_version(frame.stdin), error))


def _answer_as_ipam(frame: Frame) -> Reply:
    """Refuse to give addresses to another main plugin. What was never given is released at once."""
    if frame.command in ("DEL", "GC"):
        return Reply(ReplyStatus.DONE, b"")
    raise UnsupportedField(
        f"be an IPAM plugin as {frame.program!r}: this is not built",
        hint="use podwire-cni as the main plugin: it brings its own addresses",
    )


def _asked_version(stdin: bytes) -> str:
    """Give `cniVersion` of a configuration that may be anything; "" when it has none."""
    try:
        # The configuration may be the very fault that is reported; the version of the answer is still the one it asks
        # for.
        document = json.loads(stdin)
    except (ValueError, RecursionError):
        return ""
    version = document.get("cniVersion") if isinstance(document, dict) else None
    return version if isinstance(version, str) else ""


def _is_network_namespace(fd: int) -> bool:
    """Ask the namespace for its kind (ioctl_ns(2)); anything else does not know the question."""
    try:
        return fcntl.ioctl(fd, _NS_GET_NSTYPE) == _CLONE_NEWNET
    except OSError:
        return False

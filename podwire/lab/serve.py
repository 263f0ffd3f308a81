"""A small server inside a pod: answers each connection with one line that says who answered and who asked.

Run as a program by `lab.traffic` inside the pod's namespace: `python -m podwire.lab.serve NS/POD NODE PORT/tcp...`.
TCP: HTTP 200 with the line, also for a client that says nothing; UDP: the line, from the address that was asked.
Standard library only, because it is started for each pod.
"""

import contextlib
import os
import re
import selectors
import socket
import struct
import sys
import threading

_REQUEST_MAX_BYTES = 65_536
_REQUEST_WAIT_S = 1.0
_IP_PKTINFO = 8
"""Linux' ip(7); Python's socket module does not name it."""


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process; prints `ready` when every port is open."""
    who, node, *ports = arguments
    selector = selectors.DefaultSelector()
    for text in ports:
        port, _, protocol = text.partition("/")
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                selector.register(_open(family, int(port), protocol), selectors.EVENT_READ)
            except OSError as error:
                sys.exit(f"error: serve {text} in {who}: {error.strerror}")
    os.write(1, b"ready\n")  # in one piece: the process that waits for it does not read on
    _let_go_of_the_terminal()
    while True:
        for key, _ in selector.select():
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            # The peer may be gone already; the next one is served.
            with contextlib.suppress(OSError):
                if ready.type == socket.SOCK_DGRAM:
                    _answer_datagram(ready, f"{who} {node}")
                else:
                    connection, _ = ready.accept()
                    threading.Thread(
                        target=_answer_connection, args=(connection, f"{who} {node}"), daemon=True
                    ).start()


def _let_go_of_the_terminal() -> None:
    """Let go of stdout and stderr: nobody reads them from now on, and a reader of `lab run` waits for their end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)


def _open(family: socket.AddressFamily, port: int, protocol: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        # Without it the IPv6 socket also takes IPv4, and the second bind of the port fails (ipv6(7)).
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if protocol == "udp":
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        else:
            listener.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    else:
        # The server closes first, so its connections stay in TIME_WAIT for a minute and keep the port from the next
        # server of the pod (socket(7)).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    if protocol != "udp":
        listener.listen(128)
    return listener


def _answer_datagram(server: socket.socket, who: str) -> None:
    # A datagram socket that is bound to every address answers from the one that routing chooses, and the asker drops
    # what comes from another than it asked.
    _, ancillary, _, peer = server.recvmsg(_REQUEST_MAX_BYTES, socket.CMSG_SPACE(20))
    [(level, kind, info)] = ancillary
    if server.family == socket.AF_INET6:
        # struct in6_pktinfo: address, device; the device is left to routing.
        own, back = info[:16], info[:16] + struct.pack("=I", 0)
    else:
        # struct in_pktinfo: device, local address, destination of the header.
        own, back = info[8:12], struct.pack("=I4s4s", 0, info[8:12], bytes(4))
    line = f"{who} {socket.inet_ntop(server.family, own)} {peer[0]}\n"
    server.sendmsg([line.encode()], [(level, kind, back)], 0, peer)


def _answer_connection(connection: socket.socket, who: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_REQUEST_WAIT_S)
        with contextlib.suppress(TimeoutError):
            _read_request(connection)
        line = f"{who} {connection.getsockname()[0]} {connection.getpeername()[0]}\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(line)}\r\nConnection: close\r\n\r\n"
        connection.sendall((head + line).encode())
        # Closed with something unread, the connection would be reset and the answer lost.
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(_REQUEST_MAX_BYTES):
            pass


def _read_request(connection: socket.socket) -> None:
    """Read a request, with all of the body that it announces."""
    data = connection.recv(_REQUEST_MAX_BYTES)
    head, blank, body = data.partition(b"\r\n\r\n")
    announced = re.search(rb"(?i)\r\ncontent-length: *([0-9]{1,9})", head)
    left = int(announced[1]) - len(body) if blank and announced else 0
    while left > 0 and (chunk := connection.recv(_REQUEST_MAX_BYTES)):
        left -= len(chunk)


if __name__ == "__main__":
    main(sys.argv[1:])

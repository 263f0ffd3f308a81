"""A small server inside a pod: answers each connection with one line that says who answered and who asked.

Run as a program by `lab.traffic` inside the pod's namespace: `python -m podwire.lab.serve NS/POD NODE PORT/tcp...`.
TCP: HTTP 200 with the line; UDP: the line. Standard library only, because it is started for each pod.
"""

import selectors
import socket
import sys

_REQUEST_MAX_BYTES = 65_536


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process; prints `ready` when every port is open."""
    who, node, *ports = arguments
    selector = selectors.DefaultSelector()
    for text in ports:
        port, _, protocol = text.partition("/")
        for family in (socket.AF_INET, socket.AF_INET6):
            kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
            one = socket.socket(family, kind)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(("", int(port)))
            if kind == socket.SOCK_STREAM:
                one.listen(128)
            selector.register(one, selectors.EVENT_READ, protocol)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            try:
                _answer(ready, key.data, f"{who} {node}")
            except OSError:
                continue  # the peer went away; the next one is served


def _answer(one: socket.socket, protocol: str, who: str) -> None:
    if protocol == "udp":
        data, _, _, peer = one.recvmsg(_REQUEST_MAX_BYTES)
        del data
        one.sendto(f"{who} {_own_address(one, peer)} {peer[0]}\n".encode(), peer)
        return
    connection, peer = one.accept()
    with connection:
        connection.settimeout(2)
        connection.recv(_REQUEST_MAX_BYTES)
        line = f"{who} {connection.getsockname()[0]} {peer[0]}\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(line)}\r\nConnection: close\r\n\r\n"
        connection.sendall((head + line).encode())


def _own_address(one: socket.socket, peer: tuple[str, int]) -> str:
    """Ask the kernel which address an answer to `peer` would leave from."""
    with socket.socket(one.family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer[:2])
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    main(sys.argv[1:])

"""One TCP connection that never rests, for tests: `serve PORT` echoes, `send ADDRESS PORT PROGRESS` checks the echo.

The sender writes the number of echoed blocks to the file PROGRESS and goes on until its standard input ends; then it
closes the connection and exits with 0. Anything that is not the echo of what was sent ends it with 1.
"""

import os
import select
import socket
import sys
from pathlib import Path

BLOCK_BYTES = 32768


def serve(port: int) -> None:
    """Echo one connection until its end."""
    with socket.create_server(
        ("::", port), family=socket.AF_INET6, dualstack_ipv6=True
    ) as listener:
        print("listening", flush=True)
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(BLOCK_BYTES):
                connection.sendall(data)


def send(address: str, port: int, progress: Path) -> None:
    """Send numbered blocks, one at a time, and compare the echo."""
    with socket.create_connection((address, port)) as connection:
        number = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            block = number.to_bytes(8, "big") * (BLOCK_BYTES // 8)
            connection.sendall(block)
            if receive(connection) != block:
                sys.exit(f"block {number} came back changed")
            number += 1
            progress.write_text(str(number))


def receive(connection: socket.socket) -> bytes:
    """Read one block."""
    data = b""
    while len(data) < BLOCK_BYTES:
        part = connection.recv(BLOCK_BYTES - len(data))
        if not part:
            sys.exit("the connection ended")
        data += part
    return data


if __name__ == "__main__":
    # It never rests, so it takes what nobody else wants: beside it an agent would take long to start on a busy machine.
    os.nice(10)
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))

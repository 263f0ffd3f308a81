"""Processes of a lab and of tests are stopped as a whole."""

import signal
import subprocess
import sys
from pathlib import Path

from podwire.lab.state import describe_process, freeze_process
from tests.waiting import wait_for

BUSY = """
import sys, threading
def spin():
    while True:
        pass
for _ in range(8):
    threading.Thread(target=spin, daemon=True).start()
print("busy", flush=True)
spin()
"""


def test_no_thread_of_a_frozen_process_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "busy\n"
            for _ in range(20):
                freeze_process(describe_process(child.pid))
                assert states(child.pid) == {"T"}
                child.send_signal(signal.SIGCONT)
                wait_for(lambda: states(child.pid) != {"T"}, "a thread that goes on")
        finally:
            child.kill()


def states(pid: int) -> set[str]:
    """Give the states that the threads of a process are in."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads}

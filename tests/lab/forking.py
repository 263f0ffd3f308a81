"""The process from which `tests.lab.agent_forks` has agents forked.

It has one thread and has only imported modules, so that an agent begins with `main`, as one does that is executed.
"""

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import NoReturn

from podwire.agent import main
from podwire.kernel import netns
from tests.lab import crash_agent
from tests.lab.agent_forks import ORDER_MAX_BYTES


def serve(channel: socket.socket) -> None:
    """Fork agents, and tell how they ended, until the test closes the channel."""
    while True:
        data, descriptors, *_ = socket.recv_fds(channel, ORDER_MAX_BYTES, 1)
        if not data:
            return
        order = json.loads(data)
        if "ended" in order:
            _, status = os.waitpid(order["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            [log_fd] = descriptors
            answer = os.fork()
            if not answer:
                channel.close()
                _become_agent(order, log_fd)
            os.close(log_fd)
        channel.send(str(answer).encode())


def _become_agent(order: Mapping[str, object], log_fd: int) -> NoReturn:
    """Be an agent until it ends. Never returns: the code behind the call is that of the process that forks."""
    code: object = 1
    try:
        os.setpgid(0, 0)
        os.dup2(log_fd, sys.stdout.fileno())
        os.dup2(log_fd, sys.stderr.fileno())
        os.close(log_fd)
        environment = order["environment"]
        assert isinstance(environment, dict)
        os.environ.clear()
        os.environ.update(environment)
        with netns.open_namespace(netns.named_path(str(order["namespace"]))) as opened:
            netns.set_namespace(opened.fileno(), netns.CLONE_NEWNET)
        if "PWT_CRASH_AT" in os.environ:
            crash_agent.install(crash_agent.Fuse())
        code = main.main(["--config", str(order["config"])])
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # as the interpreter does at the end of a program
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    importlib.import_module(main.API_MODULE)
    with socket.socket(fileno=int(sys.argv[1])) as opened_channel:
        serve(opened_channel)

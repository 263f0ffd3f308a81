"""Labs whose agents start with a sixth of the work: they are forked, and find loaded programs and empty maps.

Of an agent's start, 0.95 s of CPU time, imports are half (tests/lab/agent_forks.py) and the verifier's work on programs
is a third (tests/kept_programs.py). Only a node that is new has programs lent; one that has lost its pins has to help
itself.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from podwire.datapath.programs import Capacities
from podwire.lab import labs
from podwire.lab import node as lab_nodes
from podwire.lab.state import LabState, Process, describe_process
from podwire.lab.topology import LabPlan
from tests.kept_programs import DirectoryLoans
from tests.lab.agent_forks import AgentForks

DEVICES_GO_S: Final = 10.0
"""The kernel takes the devices of a namespace away some time after its name, and they run programs until then."""
_PINS: Final = re.compile(r'^bpf_dir = "(.*)"$', re.M)
_ENTRIES: Final = re.compile(r"^conntrack_entries = (\d+)$", re.M)


@contextlib.contextmanager
def quick_labs() -> Iterator[None]:
    """Let labs of this process have such agents."""
    loans = DirectoryLoans(DEVICES_GO_S)
    remove = labs._remove_everything
    with AgentForks() as forks, pytest.MonkeyPatch.context() as patch:

        def launch(namespace: str, command: Sequence[str], log: Path) -> Process:
            program, _, config = command
            assert program == lab_nodes.agent_program()
            settings = Path(config).read_text(encoding="utf-8")
            pins, entries = _PINS.search(settings), _ENTRIES.search(settings)
            if pins is not None and entries is not None:
                loans.lend(Path(pins[1]), Capacities(int(entries[1])))
            with log.open("ab") as output:
                return describe_process(forks.fork(namespace, config, output, os.environ))

        def remove_everything(plan: LabPlan, state: LabState) -> None:
            directories = [node.pins for node in plan.nodes]
            try:
                loans.keep(directories)
            finally:
                remove(plan, state)
                loans.end(directories)

        patch.setattr(lab_nodes, "launch", launch)
        patch.setattr(labs, "_remove_everything", remove_everything)
        yield

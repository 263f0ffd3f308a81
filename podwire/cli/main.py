"""The `podwire` command: its groups, loaded when they are asked for, and the way every error ends.

An error is two lines on stderr: what failed, and what to do. Exit codes are those of the contract (docs: interfaces).
"""

import importlib
import os
import sys
from typing import Any

import click

from podwire import __version__
from podwire.cli.client import EXIT_INTERNAL, EXIT_USAGE, CliError

COMPLETION = "_PODWIRE_COMPLETE"
COMMANDS = {
    "apply": ("podwire.cli.apply", "apply", "Create or replace objects from files."),
    "bpf": ("podwire.cli.bpf", "bpf", "Rows of the BPF maps."),
    "cleanup": ("podwire.cli.cleanup", "cleanup", "Remove what podwire left on this machine."),
    "cni": ("podwire.cli.cni", "cni", "What container runtimes find of podwire."),
    "completion": ("podwire.cli.completion", "completion", "Completion for bash, zsh or fish."),
    "config": ("podwire.cli.status", "config", "Settings in force."),
    "delete": ("podwire.cli.apply", "delete", "Delete objects."),
    "describe": ("podwire.cli.objects", "describe", "One object, for people."),
    "diff": ("podwire.cli.apply", "diff", "What apply would change."),
    "doctor": ("podwire.cli.doctor", "doctor", "Look at this machine: can podwire work here?"),
    "endpoint": ("podwire.cli.endpoint", "endpoint", "The endpoints of a node."),
    "get": ("podwire.cli.objects", "get", "Objects: policies, namespaces, workloads."),
    "identity": ("podwire.cli.identity", "identity", "Identities and their labels."),
    "ipam": ("podwire.cli.ipam", "ipam", "Addresses and their owners."),
    "lab": ("podwire.cli.lab", "lab", "Nodes and pods on this one machine."),
    "monitor": ("podwire.cli.observe", "monitor", "Packets as the programs see them, live."),
    "node": ("podwire.cli.node", "node", "Nodes."),
    "observe": ("podwire.cli.observe", "observe", "Flows of the last minutes, and live."),
    "policy": (
        "podwire.cli.policy",
        "policy",
        "Policies: which pods may talk to each other, and why.",
    ),
    "service": ("podwire.cli.service", "service", "Services and their back ends."),
    "status": ("podwire.cli.status", "status", "The agent as a whole."),
    "version": ("podwire.cli.status", "version", "The version of podwire."),
}


class LazyGroup(click.Group):
    """Imports a command's module only when that command runs or is completed."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in sorted(COMMANDS.items())])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: podwire lab up && podwire lab run web --node node1 --serve 80/tcp",
)
@click.version_option(__version__, prog_name="podwire")
def podwire() -> None:
    """Pod networking with an eBPF datapath: look at a node, or build a lab on this machine."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; never returns."""
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except CliError as error:
        _fail(error.exit_code, error.message, error.hint)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except click.UsageError as error:
        place = error.ctx.command_path if error.ctx else "podwire"
        _fail(EXIT_USAGE, error.format_message(), f"{place} -h")
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except (click.Abort, KeyboardInterrupt):
        # 128 + SIGINT, as a shell reports it.
        sys.exit(130)
    except BrokenPipeError:
        _discard_output()  # the reader has seen enough
        sys.exit(0)
    except Exception as error:  # the door: nothing may leave as a traceback
        _fail(*_explain(error))
    sys.exit(0)


def _run(arguments: list[str]) -> None:
    if COMPLETION in os.environ:
        podwire.main(args=arguments, prog_name="podwire", complete_var=COMPLETION)
    # Not by `podwire.main`, which would end with 1 when the reader of a pipe has seen enough: here 1 means "not so".
    with podwire.make_context("podwire", list(arguments)) as context:
        podwire.invoke(context)


# Imported here and below: every command pays for what this module imports, and completion runs it at each TAB.
def _explain(error: Exception) -> tuple[int, str, str]:
    from podwire.model import errors  # noqa: PLC0415 (start-up time)

    if isinstance(error, errors.PodwireError):
        from podwire.cli.exit_codes import error_exit_code  # noqa: PLC0415

        return error_exit_code(error), error.message, error.hint
    if isinstance(error, PermissionError):
        return EXIT_INTERNAL, str(error), "podwire works on kernel objects: run it as root"
    if isinstance(error, OSError):
        return EXIT_INTERNAL, str(error), "check the file or socket that is named"
    return EXIT_INTERNAL, f"{type(error).__name__}: {error}", "this is a bug: please report it"


def _fail(exit_code: int, message: str, hint: str) -> None:
    """Say one line of what failed and one of what to do, and end."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    print(f"error: {_one_line(message)}", file=sys.stderr)
    print(
        f"hint: {_one_line(hint or 'podwire status --verbose and podwire doctor say more')}",
        file=sys.stderr,
    )
    sys.exit(exit_code)


def _discard_output() -> None:
    """Forget what standard output did not take: Python would flush it at exit, complain again, and end with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


if __name__ == "__main__":
    main()

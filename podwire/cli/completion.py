"""`podwire completion`: the script that a shell reads."""

import click
from click.shell_completion import get_completion_class

from podwire.cli.client import EXIT_USAGE, CliError


@click.command(epilog="Example: podwire completion bash > /etc/bash_completion.d/podwire")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from podwire.cli.main import COMPLETION, podwire  # noqa: PLC0415

    made = get_completion_class(shell)
    if made is None:
        raise CliError(EXIT_USAGE, f"complete for {shell!r}: unknown shell")
    print(made(podwire, {}, "podwire", COMPLETION).source())

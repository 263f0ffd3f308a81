"""`podwire lab node|link|partition|store`: break parts of a lab, and repair them."""

import click

from podwire.cli.client import EXIT_USAGE, CliError
from podwire.cli.lab_places import NODE_ARGUMENT, choose, complete_places, progress_of
from podwire.cli.options import Common, common
from podwire.cli.output import show_one


@click.group(epilog="Example: podwire lab node kill node1 && podwire lab node start node1")
def node() -> None:
    """Stop, start or kill the agent of a node (its pods keep running), or put a new machine in its place."""


def _add_agent_command(action: str, done: str, about: str) -> None:
    @node.command(action, help=about, epilog=f"Example: podwire lab node {action} node1")
    @NODE_ARGUMENT
    @common
    def change(opts: Common, name: str) -> None:
        from podwire.lab import labs  # noqa: PLC0415

        labs.change_agent(choose(opts.lab), name, action)
        show_one(
            {"node": name, "agent": done}, opts.style, lambda: [f"agent of {name}: {done}"], name
        )


_add_agent_command("start", "running", "Start the agent of a node and wait until it is ready.")
_add_agent_command("stop", "stopped", "Stop the agent of a node as a service manager does.")
_add_agent_command("kill", "stopped", "Kill the agent of a node (SIGKILL).")


@node.command(epilog="Example: podwire lab node replace node2")
@NODE_ARGUMENT
@common
def replace(opts: Common, name: str) -> None:
    """Put a new machine in a node's place: same name, addresses and ranges, and nothing that the old one knew."""
    from podwire.lab import labs  # noqa: PLC0415

    labs.replace_node(choose(opts.lab), name, progress=progress_of(opts))
    show_one({"node": name, "agent": "running"}, opts.style, lambda: [f"{name} is new"], name)


@click.command(epilog="Example: podwire lab partition node1 node2 && podwire lab partition heal")
@click.argument("place", metavar="A|heal", shell_complete=complete_places)
@click.argument("other", metavar="[B]", required=False, shell_complete=complete_places)
@common
def partition(opts: Common, place: str, other: str | None) -> None:
    """Let two nodes, or a node and `store`, hear nothing of each other; `heal` ends every partition."""
    from podwire.lab import labs  # noqa: PLC0415

    if other is None and place != "heal":
        raise CliError(
            EXIT_USAGE, f"cut {place!r} off from which node?", "name two nodes, or say heal"
        )
    if other is None:
        labs.heal(choose(opts.lab))
        show_one({"apart": []}, opts.style, lambda: ["all nodes reach each other"], "")
        return
    labs.set_partition(choose(opts.lab), place, other)
    show_one(
        {"apart": [place, other]}, opts.style, lambda: [f"{place} and {other} are apart"], place
    )


@click.group(epilog="Example: podwire lab store stop && podwire lab store start")
def store() -> None:
    """Stop, start or kill the etcd of a lab."""


def _add_store_command(action: str, done: str, about: str) -> None:
    @store.command(action, help=about, epilog=f"Example: podwire lab store {action}")
    @common
    def change(opts: Common) -> None:
        from podwire.lab import labs  # noqa: PLC0415

        labs.change_store(choose(opts.lab), action)
        show_one({"store": done}, opts.style, lambda: [f"etcd: {done}"], done)


_add_store_command("start", "running", "Start etcd with the files that it had.")
_add_store_command("stop", "stopped", "Stop etcd; its files stay.")
_add_store_command("kill", "stopped", "Kill etcd (SIGKILL); its files stay.")


@click.group(epilog="Example: podwire lab link down node1 && podwire lab link up node1")
def link() -> None:
    """Cut a node from the underlay, or join it again."""


def _add_link_command(word: str, about: str) -> None:
    @link.command(word, help=about, epilog=f"Example: podwire lab link {word} node1")
    @NODE_ARGUMENT
    @common
    def change(opts: Common, name: str) -> None:
        from podwire.lab import labs  # noqa: PLC0415

        labs.set_link(choose(opts.lab), name, is_up=word == "up")
        show_one(
            {"node": name, "link": word}, opts.style, lambda: [f"link of {name}: {word}"], name
        )


_add_link_command("down", "Cut a node from the underlay.")
_add_link_command("up", "Join a node to the underlay again.")

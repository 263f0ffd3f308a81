"""The command line without an agent: help, usage, reading of arguments, what is imported."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from podwire.cli import client, lab, output
from podwire.cli.client import CliError
from podwire.cli.endpoint import matches, read_selector
from podwire.cli.exit_codes import error_exit_code
from podwire.cli.main import podwire
from podwire.cni.launcher import AttachFailed
from podwire.model import errors


def _walk(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _walk(found, (*path, name))


COMMANDS = {" ".join(("podwire", *path)): command for path, command in _walk(podwire)}
LEAVES = {path: one for path, one in COMMANDS.items() if not isinstance(one, click.Group)}
WITHOUT_FORMS = {
    "podwire completion": "a script",
    "podwire lab exec": "the command's own output",
    "podwire lab shell": "the shell's own output",
    "podwire lab logs": "the log as it is",
}


@pytest.mark.parametrize("path", COMMANDS)
def test_help_of_every_command_has_an_example_of_that_command(path: str) -> None:
    command = COMMANDS[path]
    example = command.epilog or ""
    assert example.startswith(f"Example: {path}" if path in LEAVES else "Example: podwire ")
    assert command.get_short_help_str()


@pytest.mark.parametrize("path", COMMANDS)
def test_examples_parse(path: str) -> None:
    line = (COMMANDS[path].epilog or "").removeprefix("Example: podwire ").split(" && ")[0]
    words = line.split(" | ")[0].split(" > ")[0].split()
    command: click.Command = podwire
    context = click.Context(command, info_name="podwire")
    while isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None
        command = found
    command.make_context(path, words, resilient_parsing=False)


LISTED_BY = {
    "podwire endpoint list": "nl",
    "podwire get": "nl",
    "podwire identity list": "nl",
    "podwire policy entries": "nl",
    "podwire policy list": "nl",
    "podwire service list": "n",
}
"""Lists of what has a namespace (n) and labels (l)."""


@pytest.mark.parametrize(
    "path", [path for path in LEAVES if path.endswith(" list")] + ["podwire get"]
)
def test_every_list_can_be_watched_go_without_headers_and_be_narrowed(path: str) -> None:
    options = {name for parameter in LEAVES[path].params for name in parameter.opts}
    assert {"-w", "--no-headers"} <= options
    by = LISTED_BY.get(path, "")
    assert ("n" in by) == ("-n" in options) == ("-A" in options)
    assert ("l" in by) == ("-l" in options)


@pytest.mark.parametrize("path", LISTED_BY)
def test_one_namespace_and_all_of_them_exclude_each_other(path: str) -> None:
    words = [*path.split()[1:], *(["netpol"] if path == "podwire get" else [])]
    done = _run(*words, "-n", "a", "-A", "--agent", "/nowhere")
    assert (done.returncode, "exclude each other" in done.stderr) == (2, True)


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_has_every_form_and_names_its_agent(path: str) -> None:
    options = {name for parameter in LEAVES[path].params for name in parameter.opts}
    if path in WITHOUT_FORMS:
        assert "--output" not in options
        return
    assert {"-o", "-q", "--agent", "--lab", "--node"} <= options
    [form] = [parameter for parameter in LEAVES[path].params if parameter.name == "output"]
    assert isinstance(form.type, click.Choice)
    assert list(form.type.choices) == ["table", "wide", "name", "json", "yaml", "jsonl"]


@pytest.mark.parametrize("path", [path for path in LEAVES if path.endswith(" list")])
def test_lists_have_their_options(path: str) -> None:
    options = {name for parameter in LEAVES[path].params for name in parameter.opts}
    assert {"-w", "--no-headers"} <= options


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_written(shell: str) -> None:
    done = _run("completion", shell)
    assert "_PODWIRE_COMPLETE" in done.stdout
    assert done.returncode == 0


def test_completion_completes() -> None:
    done = _run(COMP_WORDS="podwire bpf c", COMP_CWORD="2", _PODWIRE_COMPLETE="bash_complete")
    assert done.stdout.split() == ["plain,cidrs", "plain,config", "plain,ct"]


@pytest.mark.parametrize(
    "command",
    [
        "endpoint list",
        "status",
        "node list",
        "ipam show",
        "observe",
    ],
)
def test_what_only_asks_the_agent_imports_nothing_that_is_slow(command: str) -> None:
    code = (
        "import sys\n"
        "from podwire.cli.main import main\n"
        f"try: main([*{command.split()}, '--agent', '/nonexistent'])\n"
        "except SystemExit as leave: assert leave.code == 3, leave.code\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90
    )
    loaded = set(done.stdout.split())
    slow = {"msgspec", "aiohttp", "asyncio", "yaml", "podwire.lab", "podwire.model", "http.client"}
    assert not loaded & slow


def _run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "podwire.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


@pytest.mark.parametrize("arguments", [(), ("lab",), ("endpoint",)])
def test_a_group_alone_shows_its_help_and_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Example: podwire" in done.stderr


def test_help_and_version_end_well() -> None:
    assert "Example:" in _run("lab", "up", "-h").stdout
    assert _run("--version").stdout.startswith("podwire, version ")


# Reading


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("web", ("web", 80, "tcp")),
        ("shop/web", ("shop/web", 80, "tcp")),
        ("web:8080", ("web", 8080, "tcp")),
        ("web:53/udp", ("web", 53, "udp")),
        ("web:53/UDP", ("web", 53, "udp")),
        ("10.0.0.1", ("10.0.0.1", 80, "tcp")),
        ("10.0.0.1:1/tcp", ("10.0.0.1", 1, "tcp")),
        ("fd10::7", ("fd10::7", 80, "tcp")),
        ("::1", ("::1", 80, "tcp")),
        ("::ffff:10.0.0.1", ("::ffff:10.0.0.1", 80, "tcp")),
        ("[fd10::7]", ("fd10::7", 80, "tcp")),
        ("[fd10::7]:65535/udp", ("fd10::7", 65535, "udp")),
    ],
)
def test_targets_are_read(text: str, target: tuple[str, int, str]) -> None:
    assert lab._read_target(text) == target


@pytest.mark.parametrize(
    "text", ["", ":", ":80", "web:", "web:0", "web:65536", "web:x", "web:80/", "web:80/x", "[::1",
             "[::1]80", "[]:80", "a:b:c", "web:٣"]
)  # fmt: skip
def test_targets_that_are_none_are_wrong_usage(text: str) -> None:
    with pytest.raises(CliError) as caught:
        lab._read_target(text)
    assert caught.value.exit_code == 2


LABELS = ("cni:app=web", "k8s:tier=front", "reserved:host", "cni:empty=")


@pytest.mark.parametrize(
    ("selector", "holds"),
    [
        ("", True),
        ("app=web", True),
        ("app==web", True),
        ("app=db", False),
        ("app!=db", True),
        ("app!=web", False),
        ("missing!=x", True),
        ("app", True),
        ("!app", False),
        ("!missing", True),
        ("app=web, tier=front", True),
        ("app=web,tier=back", False),
        ("cni:app=web", True),
        ("k8s:app=web", False),
        ("reserved:host", True),
        ("host", False),
        ("empty=", True),
        ("empty", True),
    ],
)
def test_selectors_hold_or_do_not(selector: str, holds: bool) -> None:
    assert matches(read_selector(selector), LABELS) == holds


@pytest.mark.parametrize("selector", ["a=b=c", "!a=b", "!a!=b", "a b", "=", "!", "a=b c"])
def test_selectors_that_are_none_are_wrong_usage(selector: str) -> None:
    with pytest.raises(CliError) as caught:
        read_selector(selector)
    assert caught.value.exit_code == 2


# Writing


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_table_is_as_wide_as_its_content(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [
        output.Column("A", output.key("a")),
        output.Column("LONG", output.key("b")),
        output.Column("C", output.key("c"), wide=True),
    ]
    rows: list[output.Row] = [
        {"a": "\033[32mx\033[0m", "b": True, "c": 1},
        {"a": "yyy", "b": [], "c": None},
    ]
    output.print_table(rows, columns, output.Style())
    assert _printed(capsys) == "A     LONG\n\033[32mx\033[0m     yes\nyyy   -\n"
    output.print_table(rows, columns, output.Style("wide", headers=False))
    assert _printed(capsys) == "\033[32mx\033[0m     yes   1\nyyy   -     -\n"


def test_yaml_keeps_words_that_look_like_booleans(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["x"]
    output.show_document({"a": "yes", "b": "1", "c": shared, "d": shared}, "yaml")
    assert _printed(capsys) == "a: 'yes'\nb: '1'\nc:\n- x\nd:\n- x\n"


# Talking


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"3\r\n1\n2\r\n1\r\n\n\r\n0\r\n\r\n", [b"1", b"2"]),
        (b"6;x=y\r\n{}\n{}\n\r\n0\r\n\r\n", [b"{}", b"{}"]),
        (b"1\r\n\n\r\n0\r\n\r\n", []),
    ],
)
def test_streams_are_put_together_from_their_chunks(body: bytes, lines: list[bytes]) -> None:
    reader = io.BufferedReader(io.BytesIO(body))
    chunks = client._chunks(reader, {"transfer-encoding": "chunked"})
    assert list(client._lines(chunks)) == lines


@pytest.mark.parametrize("body", [b"", b"5\r\n12", b"2\r\n1\n\r\n"])
def test_a_stream_that_breaks_off_is_noticed(body: bytes) -> None:
    reader = io.BufferedReader(io.BytesIO(body))
    with pytest.raises(ConnectionError):
        list(client._chunks(reader, {"transfer-encoding": "chunked"}))


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, 6), (404, 4), (405, 6), (408, 3), (409, 5), (413, 6), (429, 3), (500, 70), (501, 6),
     (503, 3), (507, 70)],
)  # fmt: skip
def test_what_the_agent_refuses_has_its_exit_code(status: int, code: int) -> None:
    body = {"error": {"code": "x", "message": "m", "hint": "h", "faults": [
        {"path": "a", "message": "is wrong"}]}}  # fmt: skip
    error = client._refusal(status, json.loads(json.dumps(body)))
    assert (error.exit_code, error.message, error.hint) == (code, "m; a is wrong", "h")
    assert client._refusal(status, "no JSON").exit_code == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound("x"), 4),
        (errors.Conflict("x"), 5),
        (errors.InvalidConfiguration("x"), 6),
        (errors.Cancelled("x"), 3),
        (errors.CheckFailed("x"), 1),
        (errors.Exhausted("x"), 1),
        (errors.KernelFailure(1, "x", "y"), 70),
        (errors.Bug("x"), 70),
        (AttachFailed("ADD", "p", {"code": 7}), 6),
        (AttachFailed("ADD", "p", {"code": 11}), 3),
        (AttachFailed("ADD", "p", {"code": 100}), 1),
        (AttachFailed("ADD", "p", {"code": 101}), 5),
        (AttachFailed("ADD", "p", {"code": 110}), 70),
        (AttachFailed("ADD", "p", {}), 70),
    ],
)
def test_our_own_errors_have_their_exit_codes(error: errors.PodwireError, code: int) -> None:
    assert error_exit_code(error) == code

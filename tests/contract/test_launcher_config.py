"""What the launcher reads of its configuration and answers by itself, in C and in Python alike."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from podwire import __version__
from podwire.cni.launcher import Outcome
from podwire.model import wire
from podwire.model.wire import ReplyStatus
from tests.contract.launcher_agent import answer, scripted_agent
from tests.contract.launcher_clients import CLIENTS, Run, code_of, config, environment


@pytest.mark.parametrize("variables", [{}, {"CNI_COMMAND": ""}], ids=["unset", "empty"])
def test_without_a_command_it_introduces_itself(run: Run, variables: dict[str, str]) -> None:
    outcome = run(variables, b"")
    assert (outcome.exit_status, outcome.stdout) == (0, b"")
    assert __version__ in outcome.stderr.decode()
    assert "CNI_COMMAND" in outcome.stderr.decode()


@pytest.mark.parametrize(
    ("stdin", "version"),
    [
        pytest.param(b'{"cniVersion": "0.1.0"}', "0.1.0", id="oldest"),
        pytest.param(b'{"cniVersion": "1.1.0"}', "1.1.0", id="newest"),
        pytest.param(b'{"cniVersion": "9.9.9"}', "1.1.0", id="unknown"),
        pytest.param(b'{"cniVersion": 1}', "1.1.0", id="no string"),
        pytest.param(
            b'{"cniVersion": "1.0.0", "socket": 5}', "1.0.0", id="socket is not looked at"
        ),
        pytest.param(b"", "1.1.0", id="nothing on stdin"),
    ],
)
def test_version_is_answered_without_an_agent(run: Run, stdin: bytes, version: str) -> None:
    outcome = run({"CNI_COMMAND": "VERSION", "CNI_CONTAINERID": "dummy"}, stdin)
    assert outcome.exit_status == 0
    assert json.loads(outcome.stdout) == {
        "cniVersion": version,
        "supportedVersions": ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
    }


@pytest.mark.parametrize("stdin", [b"{", b"[]", b"no", b"x" * (wire.STDIN_MAX_BYTES + 1)])
def test_version_with_a_broken_configuration_is_code_6(run: Run, stdin: bytes) -> None:
    assert code_of(run({"CNI_COMMAND": "VERSION"}, stdin)) == 6


@pytest.mark.parametrize("command", ["add", "ADD ", "UPDATE", "x" * 100_000])
def test_an_unknown_command_is_code_4(run: Run, socket_path: Path, command: str) -> None:
    assert code_of(run(environment(command), config(socket_path))) == 4


def test_an_error_has_the_version_of_the_configuration(run: Run, socket_path: Path) -> None:
    outcome = run(environment("ADD"), config(socket_path, cniVersion="0.3.1"))
    assert json.loads(outcome.stdout)["cniVersion"] == "0.3.1"


def _nested(depth: int) -> bytes:
    return b'{"a": ' + b"[" * depth + b"]" * depth + b"}"


REFUSED: Mapping[str, tuple[bytes, int]] = {
    "empty": (b"", 6),
    "white space": (b" \n", 6),
    "a list": (b"[]", 6),
    "a word": (b"null", 6),
    "cut off": (b'{"name": "n"', 6),
    "cut off in a string": (b'{"name": "n', 6),
    "cut off in an escape": (b'{"name": "\\', 6),
    "two documents": (b"{} {}", 6),
    "a comma too many": (b'{"a": 1,}', 6),
    "a comma too few": (b'{"a": 1 "b": 2}', 6),
    "a comma too many in a list": (b'{"a": [1,]}', 6),
    "brackets crossed": (b'{"a": [}]', 6),
    "key without quotes": (b"{a: 1}", 6),
    "key without value": (b'{"a"}', 6),
    "single quotes": (b"{'a': 1}", 6),
    "leading zero": (b'{"a": 01}', 6),
    "plus sign": (b'{"a": +1}', 6),
    "bare minus": (b'{"a": -}', 6),
    "bare point": (b'{"a": 1.}', 6),
    "bare exponent": (b'{"a": 1e}', 6),
    "not a number": (b'{"a": NaN}', 6),
    "infinity": (b'{"a": -Infinity}', 6),
    "newline in a string": (b'{"a": "\n"}', 6),
    "NUL": (b'{"a": 1}\0', 6),
    "NUL as an escape": (b'{"a": "\\\0"}', 6),
    "unknown escape": (b'{"a": "\\x41"}', 6),
    "short unicode escape": (b'{"a": "\\u12"}', 6),
    "byte order mark": (b"\xef\xbb\xbf{}", 6),
    "too much": (b'{"a": "' + b"x" * wire.STDIN_MAX_BYTES + b'"}', 6),
    "socket is a number": (b'{"socket": 5}', 7),
    "socket is null": (b'{"socket": null}', 7),
    "socket is an object": (b'{"socket": {"socket": "/x"}}', 7),
    "socket is empty": (b'{"socket": ""}', 7),
    "socket is relative": (b'{"socket": "run/cni.sock"}', 7),
    "socket has a NUL": (b'{"socket": "/run\\u0000/cni.sock"}', 7),
    "socket has half a pair": (b'{"socket": "/run/\\ud800"}', 7),
    "socket is too long": (b'{"socket": "/' + b"x" * 107 + b'"}', 7),
    "the last socket is bad": (b'{"socket": "/x", "socket": 5}', 7),
    "wait is a string": (b'{"agent-wait": "30"}', 7),
    "wait is negative": (b'{"agent-wait": -1}', 7),
    "wait is minus zero": (b'{"agent-wait": -0}', 7),
    "wait is a fraction": (b'{"agent-wait": 1.5}', 7),
    "wait is written with an exponent": (b'{"agent-wait": 1e1}', 7),
    "wait is too long": (b'{"agent-wait": 601}', 7),
    "wait is astronomic": (b'{"agent-wait": ' + b"9" * 5000 + b"}", 7),
    "wait is true": (b'{"agent-wait": true}', 7),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_a_configuration_that_is_wrong_is_refused(run: Run, command: str, case: str) -> None:
    stdin, code = REFUSED[case]
    assert code_of(run(environment(command), stdin)) == code


def test_an_environment_that_does_not_fit_is_code_4(run: Run, socket_path: Path) -> None:
    # A single variable has at most 128 KiB (MAX_ARG_STRLEN).
    many = {f"CNI_{number}": "x" * 120_000 for number in range(9)}
    assert code_of(run(environment("ADD", **many), config(socket_path))) == 4


def _accepted(socket_path: Path) -> Mapping[str, bytes]:
    path = str(socket_path)
    escaped = "".join(f"\\u{ord(char):04x}" for char in path)
    keys = {f"key{number}": number for number in range(10_000)}
    return {
        "escaped value": f'{{"socket": "{escaped}"}}'.encode(),
        "escaped key": f'{{"\\u0073ocke\\u0074": "{path}"}}'.encode(),
        "escaped slashes": json.dumps({"socket": path}).replace("/", "\\/").encode(),
        "10,000 keys": json.dumps(keys | {"socket": path}).encode(),
        "socket deeper down first": json.dumps(
            {"a": {"socket": "/bad"}, "b": [{"socket": 5}], "socket": path, "c": {"socket": 6}}
        ).encode(),
        "socket as a value": json.dumps({"a": "socket", "b": ["socket"], "socket": path}).encode(),
        "the last of two": f'{{"socket": 5, "socket": "{path}"}}'.encode(),
        "a key that begins alike": json.dumps({"socket2": 1, "sock": 2, "socket": path}).encode(),
        "quotes inside strings": json.dumps({'a"b': '"socket": 5, {[', "socket": path}).encode(),
        "no white space": f'{{"agent-wait":0,"socket":"{path}"}}'.encode(),
        "much white space": f'\r\n\t {{\n"socket"\t:\r "{path}" }}\n\n'.encode(),
        "all kinds of values": json.dumps(
            {"a": [None, True, False, -0.5e-7, 1e300, {}, [], ""], "socket": path}
        ).encode(),
        "empty key": json.dumps({"": "", "socket": path}).encode(),
    }


@pytest.mark.parametrize("case", _accepted(Path("/")))
def test_the_socket_is_found_wherever_the_top_level_has_it(
    run: Run, socket_path: Path, case: str
) -> None:
    stdin = _accepted(socket_path)[case]
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, b"{}")) as agent:
        assert run(environment("ADD"), stdin) == Outcome(0, b"{}")
    assert agent.received[0].frame.stdin == stdin


def test_a_path_that_is_not_ascii_is_found(run: Run, tmp_path: Path) -> None:
    socket_path = tmp_path / "dä€𝄞.sock"
    for ensure_ascii in (True, False):
        stdin = json.dumps({"socket": str(socket_path)}, ensure_ascii=ensure_ascii).encode()
        with scripted_agent(socket_path, answer(ReplyStatus.DONE, b"{}")):
            assert run(environment("ADD"), stdin) == Outcome(0, b"{}")


def test_the_longest_socket_path_works(run: Run, tmp_path: Path) -> None:
    directory = str(tmp_path) + "/"
    socket_path = Path(directory + "s" * (wire.SOCKET_PATH_MAX_BYTES - len(directory)))
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, b"{}")):
        assert run(environment("ADD"), config(socket_path)) == Outcome(0, b"{}")


def test_deep_nesting_is_no_crash(run: Run, socket_path: Path) -> None:
    outcome = run(environment("GC"), _nested(400_000))
    assert code_of(outcome) in (6, 11)


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["/pwt-none/a.sock", "relative", "/\0", "1.0.0", "9.9"])
)
_keys = st.sampled_from(["socket", "agent-wait", "cniVersion", "a"]) | st.text(max_size=4)
_trees = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=12,
)
_documents = st.builds(
    lambda tree, ascii_, indent: json.dumps(tree, ensure_ascii=ascii_, indent=indent).encode(
        errors="surrogatepass"
    ),
    st.dictionaries(_keys, _trees, max_size=5),
    st.booleans(),
    st.sampled_from([None, 1]),
)


@st.composite
def _damaged_documents(draw: st.DrawFn) -> bytes:
    raw = bytearray(draw(_documents))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(raw) - 1))
        if draw(st.booleans()):
            raw[at : at + 1] = draw(
                st.sampled_from([b"", b'"', b"\\", b",", b"}", b"[", b"0", b":"])
            )
        if not raw:
            return b""
    return bytes(raw)


@settings(suppress_health_check=list(HealthCheck))
@given(stdin=_damaged_documents())
@example(stdin=b'{"a": "\\ud834\\udd1e"}')
@example(stdin=b'{"cniVersion": "0.1.0}')
@example(stdin=b'{"cniVersion": "0.1.0", "a"')
def test_both_clients_judge_every_document_alike(launcher: Path, stdin: bytes) -> None:
    assert launcher.exists()
    # GC: an absent agent is code 11 at once, whatever agent-wait says.
    outcomes = [run(environment("GC"), stdin) for run in CLIENTS.values()]
    errors = [json.loads(outcome.stdout) for outcome in outcomes]
    assert [outcome.exit_status for outcome in outcomes] == [1, 1]
    assert errors[0]["code"] == errors[1]["code"]
    assert errors[0]["cniVersion"] == errors[1]["cniVersion"]

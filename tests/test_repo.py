"""The repository keeps its own rules: sizes, headlines, layers that linters do not see, and one list of checks."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
FUNCTION_LINES: Final = 50
MODULE_LINES: Final = 500
BPF_FUNCTION_LINES: Final = 40
WAIVER: Final = re.compile(r"(#|/\*|\*|//) ?size: \w+")
"""A waiver stands in the file that is too long, or on the line of the function's head, and says why."""
DEBT: Final = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
DOORS: Final = ("agent", "cli", "lab")
GENERATED: Final = {"podwire/datapath/abi.py"}


def tracked(*patterns: str) -> list[Path]:
    """List the files under version control that are still there."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns],
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


if not (ROOT / ".git").exists():
    pytest.skip("not a git checkout", allow_module_level=True)
PYTHON: Final = tracked("podwire/*.py", "bench/*.py", "tests/*.py")
SOURCES: Final = [path for path in PYTHON if not path.is_relative_to(ROOT / "tests")]
C_FILES: Final = tracked("bpf/*.[ch]", "launcher/*.[ch]", "bench/*.c")


def name_of(path: Path) -> str:
    """Give a path as the repository knows it."""
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[tuple[str, int, str]]:
    """Give name, lines of body without docstring, and the head's line, of each function in a Python file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield node.name, length, lines[node.lineno - 1]


def c_functions(path: Path) -> Iterator[tuple[str, int, str]]:
    """Give head and lines of body of each C function; the kernel's style has its braces in the first column."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begin = 0
    for number, line in enumerate(lines):
        if line == "{":
            begin = number
        elif line == "}" and begin:
            yield lines[begin - 1].strip(), number - begin - 1, "\n".join(lines[begin - 6 : begin])
            begin = 0


def test_functions_fit_on_a_screen() -> None:
    found = [(path, FUNCTION_LINES, *one) for path in PYTHON for one in functions(path)]
    for path in C_FILES:
        limit = BPF_FUNCTION_LINES if path.is_relative_to(ROOT / "bpf") else FUNCTION_LINES
        found += [(path, limit, *one) for one in c_functions(path)]
    assert not [
        f"{name_of(path)}: {name}: {length} lines"
        for path, limit, name, length, head in found
        if length > limit and not WAIVER.search(head)
    ]


def test_modules_are_about_one_thing() -> None:
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in [*SOURCES, *C_FILES]}
    assert not [
        f"{name}: {text.count(chr(10))} lines"
        for name, text in texts.items()
        if text.count("\n") > MODULE_LINES and name not in GENERATED and not WAIVER.search(text)
    ]


def test_modules_open_with_a_sentence() -> None:
    texts = {name_of(path): path.read_text(encoding="utf-8").strip() for path in PYTHON}
    first = {
        name: (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
        for name, text in texts.items()
        if text
    }
    assert not [name for name, text in first.items() if not re.search(r"[.?](\s|$)", text)]


def test_async_code_is_in_the_agent_only() -> None:
    found = [
        name_of(path)
        for path in SOURCES
        if not path.is_relative_to(ROOT / "podwire/agent")
        and any(
            isinstance(node, ast.AsyncFunctionDef)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert not found


def test_only_doors_read_arguments_and_the_environment() -> None:
    allowed = {"podwire/kernel/spawn.py"}  # children inherit the environment unless told otherwise
    found = [
        name_of(path)
        for path in tracked("podwire/*.py")
        if path.relative_to(ROOT).parts[1] not in DOORS
        and name_of(path) not in allowed
        and re.search(r"\b(os\.environ|os\.getenv|sys\.argv)\b", path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_nothing_is_left_for_later() -> None:
    found = [
        f"{name_of(path)}:{number}: {line}"
        for path in [*PYTHON, *C_FILES, *tracked("scripts", "docs", "*.md")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if DEBT.search(line)
    ]
    assert not found


def test_no_binaries_are_under_version_control() -> None:
    assert not [name_of(path) for path in tracked() if b"\0" in path.read_bytes()[:8000]]


def test_locked_dependencies_name_hashes_and_no_registry() -> None:
    for path in tracked("requirements/*.txt"):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text
        if path.name != "debian.txt":
            for entry in re.split(r"\n(?=\S)", text.strip()):
                assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_scripts_can_be_executed() -> None:
    wanted = [path for path in tracked("scripts", ".ci") if path.suffix != ".sh"]
    assert not [name_of(path) for path in wanted if not os.access(path, os.X_OK)]


def test_each_commit_is_checked_by_the_same_list() -> None:
    listed = subprocess.run(
        [ROOT / "scripts/check", "--list"], capture_output=True, text=True, check=True
    )
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entry: scripts/check (\S+?),", hooks) == listed.stdout.split()

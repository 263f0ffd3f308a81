"""The repository keeps its own rules: sizes, headlines, layers that linters do not see, and one list of checks."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from podwire.cli.main import COMMANDS

ROOT: Final = Path(__file__).resolve().parents[1]
FUNCTION_LINES: Final = 50
MODULE_LINES: Final = 500
BPF_FUNCTION_LINES: Final = 40
PACKAGE_MODULES: Final = 12
WAIVER: Final = re.compile(r"(#|/\*|\*|//) ?size: \w+")
"""A waiver stands in the file that is too long, or on the line of the function's head, and says why."""
DEBT: Final = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
DOORS: Final = ("agent", "cli", "lab")
SLOW: Final = re.compile(
    r"podwire\.(agent|cni|control|datapath|journal|kernel|lab|store)\b|(aiohttp|asyncio|http|ryaml)\b"
)
"""What no command of `podwire` imports before it needs it: a list would take longer to begin than to print."""
GENERATED: Final = {"podwire/datapath/abi.py"}
ELSEWHERE: Final = re.compile(r"(?<![\w.}/])/(work|home|Users|mnt)/\w")
"""Paths of somebody's own machine: a checkout elsewhere must not meet them."""
URL: Final = re.compile(r"https?://([\w-]+(?:\.[\w-]+)+)")
HOSTS: Final = {"127.0.0.1", "www.apache.org", "www.w3.org"}
"""The hosts that a text may name; whoever needs a mirror or a registry sets that on the machine."""


def tracked(*patterns: str) -> list[Path]:
    """List the files under version control that are still there."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--", *patterns],
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


if not (ROOT / ".git").exists():
    pytest.skip("not a git checkout", allow_module_level=True)
PYTHON: Final = [
    *tracked("podwire/*.py", "bench/*.py", "tests/*.py"),
    *(
        path
        for path in tracked("scripts/*")
        if path.read_text().startswith("#!/usr/bin/env python3")
    ),
]
SOURCES: Final = [path for path in PYTHON if not path.is_relative_to(ROOT / "tests")]
C_FILES: Final = tracked("bpf/*.[ch]", "launcher/*.[ch]", "bench/*.c")


def name_of(path: Path) -> str:
    """Give a path as the repository knows it."""
    return str(path.relative_to(ROOT))


def test_no_merge_is_left_half_done() -> None:
    """A marker of a conflict that was committed is text that nobody meant."""
    marker = re.compile(r"^(<{7} |>{7} )", re.MULTILINE)
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in tracked()}
    assert [name_of(path) for path, text in texts.items() if marker.search(text)] == []


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Give the statements inside a node, however deep; no function is inside an expression."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, name, ())
        for child in inner if isinstance(inner, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def functions(path: Path) -> Iterator[tuple[str, int, str]]:
    """Give name, lines of body without docstring, and the head's line, of each function in a Python file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in statements(tree_of(path)):
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
    found = [(path, FUNCTION_LINES, *function) for path in PYTHON for function in functions(path)]
    for path in C_FILES:
        limit = BPF_FUNCTION_LINES if path.is_relative_to(ROOT / "bpf") else FUNCTION_LINES
        found += [(path, limit, *function) for function in c_functions(path)]
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
    trees = {name_of(path): tree_of(path) for path in PYTHON}
    first = {
        name: (ast.get_docstring(tree) or "").split("\n\n")[0]
        for name, tree in trees.items()
        if tree.body
    }
    assert not [name for name, text in first.items() if not re.search(r"[.?](\s|$)", text)]


def test_async_code_is_only_where_a_network_is_waited_for() -> None:
    found = [
        name_of(path)
        for path in SOURCES
        if not path.is_relative_to(ROOT / "podwire/agent")
        and not path.is_relative_to(ROOT / "podwire/store/etcd")
        and not path.is_relative_to(ROOT / "podwire/store/kubernetes")
        and path != ROOT / "podwire/store/sockets.py"
        and any(isinstance(node, ast.AsyncFunctionDef) for node in statements(tree_of(path)))
    ]
    assert not found


def module_file(module: str) -> Path | None:
    """Find the file of a module of podwire."""
    path = ROOT / module.replace(".", "/")
    return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)


def imported_at_once(module: str) -> set[str]:
    """Give what is imported, through any number of modules, when a module of podwire is imported."""
    reached, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if name in reached:
            continue
        reached.add(name)
        for node in tree_of(path).body if path else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                waiting += [node.module, *filter(module_file, inner)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
    return reached


def test_commands_import_what_is_slow_only_where_they_need_it() -> None:
    commands = {module for module, _, _ in COMMANDS.values()}
    found = {
        command: sorted(filter(SLOW.match, imported_at_once(command)))
        for command in ["podwire.cli.main", *sorted(commands)]
    }
    assert not {command: slow for command, slow in found.items() if slow}


@pytest.mark.parametrize(
    ("module", "slow"),
    [("podwire.cli.documents", "podwire.store.manifest"), ("podwire.lab.labs", "podwire.lab.node")],
)
def test_what_is_imported_at_once_is_seen(module: str, slow: str) -> None:
    assert slow in imported_at_once(module)


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


def test_packages_can_be_taken_in() -> None:
    packages = {
        path.parent
        for path in tracked("podwire/*/__init__.py")
        if not WAIVER.search(path.read_text(encoding="utf-8"))
    }
    modules = {package: tracked(f"{name_of(package)}/*.py") for package in packages}
    counts = {
        name_of(package): sum(path.parent == package for path in found) - 1
        for package, found in modules.items()
    }
    assert not {name: count for name, count in counts.items() if count > PACKAGE_MODULES}


def test_nothing_names_a_machine_or_a_registry() -> None:
    found = [
        f"{name_of(path)}:{number}: {line}"
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path != Path(__file__) and (ELSEWHERE.search(line) or set(URL.findall(line)) - HOSTS)
    ]
    assert not found


def test_programs_name_their_licence() -> None:
    expected = "SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause"
    files = tracked("bpf/*.[ch]", "bench/bpf/*.[ch]")
    first = {name_of(path): path.read_text(encoding="utf-8").split("\n", 1)[0] for path in files}
    assert files
    assert not [name for name, line in first.items() if expected not in line]


def names_in(path: Path) -> set[str]:
    """Give the packages that a file of requirements names, spelt the canonical way."""
    found = re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)", path.read_text(encoding="utf-8"))
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_locked_dependencies_name_hashes_and_no_registry(name: str) -> None:
    wanted, lock = (ROOT / f"requirements/{name}.{kind}" for kind in ("in", "txt"))
    assert names_in(wanted) <= names_in(lock)
    text = lock.read_text(encoding="utf-8")
    assert "://" not in text
    for entry in re.split(r"\n(?=\S)", text.strip()):
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_what_podwire_needs_to_run_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(project["dependencies"]) == sorted(
        name.replace("-", "_") if name == "prometheus-client" else name
        for name in names_in(ROOT / "requirements/runtime.in")
    )


def test_generated_documents_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/generate-docs"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_scripts_are_what_their_shell_can_read() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in tracked("scripts", ".ci", "*.sh")}
    scripts = [path for path, text in texts.items() if re.match(r"#!.*sh\b", text)]
    assert scripts
    for path in [*scripts, ROOT / "scripts/lib.sh"]:
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_scripts_can_be_executed() -> None:
    wanted = [path for path in tracked("scripts", ".ci") if path.suffix != ".sh"]
    assert not [name_of(path) for path in wanted if not os.access(path, os.X_OK)]


def test_each_commit_is_checked_by_the_same_list() -> None:
    listed = subprocess.run(
        [ROOT / "scripts/check", "--list"], capture_output=True, text=True, check=True
    )
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entry: scripts/check (\S+?),", hooks) == listed.stdout.split()

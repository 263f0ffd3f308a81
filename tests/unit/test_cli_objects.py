"""The object commands, as a person types them, with an agent and on the store itself: what they print and end with."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from podwire.cli.client import CliError
from podwire.cli.main import main
from podwire.cli.objects import validate_files
from podwire.model.store import ObjectKey, StoredObject
from podwire.store.manifest import dump, load_manifests
from podwire.store.sqlite import SqliteStore
from tests.unit.objects_agent import serving_objects
from tests.unit.policies import (
    cidr_group,
    cilium_policy,
    namespace_object,
    network_policy,
    workload,
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.splitlines()]


@dataclass(frozen=True)
class Shell:
    """Runs commands against one store, in one of two ways."""

    directory: Path
    store: SqliteStore
    options: tuple[str, ...]
    capture: pytest.CaptureFixture[str]

    def run(self, line: str, *more: str) -> Done:
        words = [word.replace("FILES", str(self.directory)) for word in line.split()]
        with pytest.raises(SystemExit) as leave:
            main([*words, *more, *self.options])
        out, err = self.capture.readouterr()
        assert isinstance(leave.value.code, int)
        return Done(leave.value.code, out, err)

    def write(self, name: str, *documents: Any) -> str:
        path = self.directory / name
        path.write_text(dump(documents))
        return str(path)

    @property
    def revision(self) -> int:
        return self.store.list("workloads")[1]


@pytest.fixture(params=["agent", "store"])
def shell(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Shell]:
    files = tmp_path / "files"
    files.mkdir()
    path = tmp_path / "store.db"
    with contextlib.closing(SqliteStore(path)) as store:
        if request.param == "store":
            yield Shell(files, store, ("--store", f"sqlite://{path}"), capsys)
            return
        socket = tmp_path / "api.sock"
        with serving_objects(socket, store):
            yield Shell(files, store, ("--agent", str(socket)), capsys)


# ------------------------------------------------------------------ kinds of one name


@pytest.mark.parametrize(
    ("word", "names"),
    [("nodes", ["nodes/ours"]), ("pwn", ["nodes/ours"]), ("nodes.podwire.io", ["nodes/ours"]),
     ("nodes.core", ["nodes.core/theirs"]), ("Node.core", ["nodes.core/theirs"])],
)  # fmt: skip
def test_kinds_of_one_name_are_told_apart_by_their_groups(
    shell: Shell, word: str, names: list[str]
) -> None:
    for plural, version, name in (
        ("nodes", "podwire.io/v1", "ours"),
        ("nodes.core", "v1", "theirs"),
    ):
        document = {"apiVersion": version, "kind": "Node", "metadata": {"name": name}, "spec": {}}
        shell.store.create(StoredObject(key=ObjectKey(plural, "", name), document=document))
    assert shell.run(f"get {word} -o name").lines == [names]
    name = names[0].partition("/")[2]
    assert shell.run(f"get {word} {name} -o json").json["metadata"]["name"] == name
    assert ["Name:", name] in shell.run(f"describe {word} {name}").lines


def test_what_is_kubernetes_own_is_not_deleted(shell: Shell) -> None:
    document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}, "spec": {}}
    shell.store.create(StoredObject(key=ObjectKey("nodes.core", "", "a"), document=document))
    done = shell.run("delete nodes.core a")
    assert done.code != 0
    assert "belongs to Kubernetes" in done.err
    assert shell.store.get(ObjectKey("nodes.core", "", "a")) is not None


# ------------------------------------------------------------------ apply


def test_apply_tells_what_became_of_each_object(shell: Shell) -> None:
    shell.write("a.yaml", network_policy("a", "shop"), namespace_object("shop"), cidr_group())
    done = shell.run("apply -f FILES/a.yaml")
    assert (done.code, done.err) == (0, "")
    assert done.lines == [
        ["KIND", "NAMESPACE", "NAME", "RESULT"],
        ["networkpolicies", "shop", "a", "created"],
        ["namespaces", "-", "shop", "created"],
        ["ciliumcidrgroups", "-", "office", "created"],
    ]
    shell.write("a.yaml", network_policy("a", "shop", ingress=[]), cidr_group())
    done = shell.run("apply -f FILES/a.yaml -o json")
    assert [applied["action"] for applied in done.json] == ["configured", "unchanged"]
    assert shell.run("apply -f FILES/a.yaml -o name").lines == [
        ["networkpolicies/shop/a"],
        ["ciliumcidrgroups/office"],
    ]
    assert shell.run("apply -f FILES/a.yaml --no-headers").lines[0][-1] == "unchanged"


def test_apply_reads_a_directory_several_files_and_stdin(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.write("b.yml", network_policy("b"))
    shell.write("a.yaml", network_policy("a"))
    shell.write("c.json", network_policy("c"))
    (shell.directory / "notes.txt").write_text("not: [yaml")
    assert [line[2] for line in shell.run("apply -f FILES --no-headers").lines] == ["a", "b", "c"]
    text = dump([network_policy("d")]).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    done = shell.run("apply -f FILES/a.yaml -f - --no-headers")
    assert [line[2:] for line in done.lines] == [["a", "unchanged"], ["d", "created"]]


def test_apply_with_a_namespace_is_for_objects_that_name_none(shell: Shell) -> None:
    shell.write("a.yaml", network_policy("a", None), namespace_object("shop"))
    assert shell.run("apply -n shop -f FILES/a.yaml").code == 0
    assert shell.store.get(ObjectKey("networkpolicies", "shop", "a")) is not None
    shell.write("a.yaml", network_policy("a", "other"))
    done = shell.run("apply -n shop -f FILES/a.yaml")
    assert done.code == 6
    assert "not 'shop' as was asked for" in done.err


def test_a_dry_run_says_so_and_writes_nothing(shell: Shell) -> None:
    shell.write("a.yaml", network_policy("a"))
    done = shell.run("apply -f FILES/a.yaml --dry-run --no-headers")
    assert done.lines == [["networkpolicies", "default", "a", "created", "(dry", "run)"]]
    assert shell.run("apply -f FILES/a.yaml --dry-run -o json").json[0]["dryRun"] is True
    assert shell.revision == 0


def bad_port(shell: Shell) -> None:
    shell.write(
        "x.yaml", network_policy("a"), network_policy("b", ingress=[{"ports": [{"port": 0}]}])
    )


def bad_list(shell: Shell) -> None:
    shell.write("x.yaml", {"kind": "List", "items": [network_policy("a"), workload(labels={})]})


def bad_label(shell: Shell) -> None:
    selector = {"matchLabels": {"example.com/a": "-"}}
    shell.write("x.yaml", network_policy("a", podSelector=selector))


def bytes_of(raw: bytes) -> Callable[[Shell], object]:
    return lambda shell: (shell.directory / "x.yaml").write_bytes(raw)


REFUSED: dict[str, tuple[Callable[[Shell], object], str]] = {
    "a field": (
        bad_port,
        "x.yaml:34 (document 2, NetworkPolicy default/b) spec.ingress[0].ports[0].port is 0, not from",
    ),
    "an item of a List": (
        bad_list,
        "x.yaml:30 (document 1 items[1], Workload web) spec.labels is missing",
    ),
    "a label": (
        bad_label,
        "x.yaml:9 (document 1, NetworkPolicy default/a) spec.podSelector.matchLabels['example.com/a'] is",
    ),
    "an unknown kind": (
        bytes_of(b"apiVersion: v1\nkind: Gadget\nmetadata: {name: a}\n"),
        "x.yaml:2 (document 1, Gadget a) kind is 'Gadget', not one of Namespace",
    ),
    "a namespace that does not exist": (
        lambda shell: shell.write("x.yaml", network_policy("a", "nowhere")),
        "x.yaml:5 (document 1, NetworkPolicy nowhere/a) metadata.namespace is 'nowhere', which does not exist",
    ),
    "a duplicate": (
        lambda shell: shell.write("x.yaml", network_policy("a"), network_policy("a")),
        "x.yaml:22 (document 2, NetworkPolicy default/a) is networkpolicies default/a again: ",
    ),
    "a name that is none": (
        bytes_of(b"apiVersion: podwire.io/v1\nkind: Workload\nmetadata: {name: [1]}\n"),
        "x.yaml:3 (document 1, Workload) metadata.name is",
    ),
    "a key twice": (
        bytes_of(b"# c\n---\nkind: a\nkind: b\n"),
        "x.yaml: document 1 (line 4) has the key 'kind' twice",
    ),
    "no YAML": (bytes_of(b"a: 1\n---\nb: [\n"), "x.yaml: document 2 (line"),
    "bytes": (bytes_of(b"\xff\xfe"), "x.yaml (line 1) is no UTF-8"),
    "nothing": (bytes_of(b"# nothing\n"), "x.yaml holds no object"),
    "too large": (bytes_of(b"#" * (10 << 20)), "x.yaml has more than 8388608 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["apply", "diff"])
def test_what_is_refused_names_file_line_document_and_field(
    shell: Shell, name: str, command: str
) -> None:
    prepare, expected = REFUSED[name]
    shell.write("good.yaml", network_policy("good"))
    prepare(shell)
    done = shell.run(f"{command} -f FILES/good.yaml -f FILES/x.yaml")
    assert done.code == 6
    assert expected in done.err
    assert str(shell.directory) in done.err
    assert len(done.err.splitlines()) == 2, "what failed, and what to do"
    assert done.out == ""
    assert shell.revision == 0


def test_each_wrong_file_is_named(shell: Shell) -> None:
    (shell.directory / "x.yaml").write_text("a: [")
    (shell.directory / "y.yaml").write_text("b: {")
    done = shell.run("apply -f FILES")
    assert done.code == 6
    assert "x.yaml: document 1" in done.err
    assert "y.yaml: document 1" in done.err


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ("apply -f /nonexistent/x.yaml", 2, "No such file"),
        ("apply -f FILES", 2, "no .yaml, .yml, .json file"),
        ("apply", 2, "--file"),
        ("delete", 2, "name what to delete"),
        ("delete netpol", 2, "name what to delete"),
        ("delete netpol a -f FILES", 2, "name what to delete"),
        ("get gadgets", 2, "there is no such kind"),
        ("get", 2, "KIND"),
        ("get netpol -n a -A", 2, "exclude each other"),
        ("get netpol a -l x=y", 2, "for lists"),
        ("get netpol a -w", 2, "-w is for lists"),
        ("get netpol a/b -n c", 2, "-n says"),
        ("get ccnp x -n y", 2, "have no namespace"),
        ("get netpol -l ==", 2, "read selector"),
        ("get netpol nothing", 4, "get networkpolicies default/nothing: there is none"),
        ("describe ns nothing", 4, "get namespaces nothing: there is none"),
        ("delete netpol nothing", 4, "delete networkpolicies default/nothing: there is none"),
    ],
)
def test_exit_codes_tell_usage_from_absence(
    shell: Shell, line: str, code: int, expected: str
) -> None:
    done = shell.run(line)
    assert done.code == code, done.err
    assert expected in done.err
    assert done.out == ""


# ------------------------------------------------------------------ get and describe


@pytest.fixture
def filled(shell: Shell) -> Shell:
    blue = network_policy("blue", "shop")
    blue["metadata"]["labels"] = {"colour": "blue"}
    shell.write(
        "all.yaml",
        *(namespace_object("shop"), blue, network_policy("red", "shop"), network_policy("web")),
        *(cilium_policy("all", None), workload(), cidr_group()),
    )
    assert shell.run("apply -f FILES/all.yaml").code == 0
    return shell


def test_a_list_shows_every_namespace_or_one(filled: Shell) -> None:
    lines = filled.run("get netpol").lines
    assert lines[0] == ["NAMESPACE", "NAME", "CREATED"]
    assert [line[:2] for line in lines[1:]] == [
        ["default", "web"],
        ["shop", "blue"],
        ["shop", "red"],
    ]
    assert filled.run("get netpol -A").lines == lines
    assert [line[1] for line in filled.run("get netpol -n shop --no-headers").lines] == [
        "blue",
        "red",
    ]
    assert filled.run("get netpol -n nowhere --no-headers").lines == []
    assert filled.run("get ccnp").lines[0] == ["NAME", "CREATED"]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("colour=blue", ["blue"]),
        ("colour", ["blue"]),
        ("!colour", ["red"]),
        ("colour!=blue", ["red"]),
        ("", ["blue", "red"]),
    ],
)
def test_a_selector_chooses_by_labels(filled: Shell, selector: str, names: list[str]) -> None:
    done = filled.run("get netpol -n shop -o name -l", selector)
    assert done.lines == [[f"networkpolicies/shop/{name}"] for name in names]


def test_the_json_of_a_list_is_a_list_that_apply_takes_back(filled: Shell) -> None:
    done = filled.run("get netpol -o json")
    assert (done.json["kind"], len(done.json["items"])) == ("List", 3)
    revision = filled.revision
    for form in ("json", "yaml", "jsonl"):
        path = filled.directory / "back.yaml"
        path.write_text(filled.run(f"get netpol -o {form}").out)
        back = filled.run("apply -f FILES/back.yaml -o json")
        assert [applied["action"] for applied in back.json] == ["unchanged"] * 3
    assert filled.revision == revision
    assert filled.run("get identity -o json").json["items"] == []


def test_one_object_is_shown_whole(filled: Shell) -> None:
    found = filled.run("get netpol blue -n shop -o json").json
    assert found["metadata"]["labels"] == {"colour": "blue"}
    assert found["metadata"]["resourceVersion"].isdigit()
    assert found["spec"] == network_policy()["spec"]
    [loaded] = load_manifests(filled.run("get netpol shop/blue -o yaml").out.encode(), "f")
    assert loaded.document == found
    assert filled.run("get netpol shop/blue -o name").out == "networkpolicies/shop/blue\n"
    assert filled.run("get netpol shop/blue -q").out in ("", "networkpolicies/shop/blue\n")
    assert [line[:2] for line in filled.run("get netpol web").lines] == [
        ["NAMESPACE", "NAME"],
        ["default", "web"],
    ]


def test_describe_says_who_and_what(filled: Shell) -> None:
    text = filled.run("describe netpol shop/blue").out
    for expected in (
        "Name:        blue",
        "Namespace:   shop",
        "colour=blue",
        "Spec:\n  podSelector:",
    ):
        assert expected in text
    assert filled.run("describe workload web -o json").json["spec"] == workload()["spec"]
    assert "Namespace:" not in filled.run("describe ccnp all").out


def test_a_watched_list_goes_on_with_what_changes(filled: Shell) -> None:
    command = [sys.executable, "-m", "podwire.cli.main", "get", "netpol", "-w", "-o", "jsonl"]
    with subprocess.Popen([*command, *filled.options], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            names = {json.loads(child.stdout.readline())["metadata"]["name"] for _ in range(3)}
            assert names == {"blue", "red", "web"}
            filled.store.delete(ObjectKey("networkpolicies", "shop", "red"))
            gone = json.loads(child.stdout.readline())
            assert (gone["metadata"]["name"], gone["gone"]) == ("red", True)
        finally:
            child.terminate()


# ------------------------------------------------------------------ diff


def test_diff_shows_what_apply_would_change_and_changes_nothing(filled: Shell) -> None:
    revision = filled.revision
    assert filled.run("diff -f FILES/all.yaml") == Done(0, "", "")
    changed = network_policy("web", ingress=[{"ports": [{"port": 81}]}])
    filled.write("new.yaml", changed, cidr_group("new"), network_policy("red", "shop"))
    done = filled.run("diff -f FILES/new.yaml")
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[0] == "--- networkpolicies/default/web (now)"
    assert lines[1] == "+++ networkpolicies/default/web"
    assert "-    - protocol: TCP" in "\n".join(lines) or "-      port: 80" in lines
    assert "+    - port: 81" in lines
    assert "+kind: CiliumCIDRGroup" in lines
    assert "shop/red" not in done.out
    assert filled.run("diff -f FILES/new.yaml -q") == Done(1, "", "")
    assert [applied["action"] for applied in filled.run("diff -f FILES/new.yaml -o json").json] == [
        "configured",
        "created",
    ]
    assert filled.revision == revision


# ------------------------------------------------------------------ delete


def test_delete_by_name(filled: Shell) -> None:
    done = filled.run("delete netpol blue red -n shop --dry-run --no-headers")
    assert [line[2:] for line in done.lines] == [
        ["blue", "deleted", "(dry", "run)"],
        ["red", "deleted", "(dry", "run)"],
    ]
    assert filled.run("delete netpol blue red -n shop").code == 0
    assert filled.run("get netpol -o name").lines == [["networkpolicies/default/web"]]


def test_delete_by_file_removes_all_and_names_what_was_not_there(filled: Shell) -> None:
    assert filled.run("delete netpol shop/red").code == 0
    done = filled.run("delete -f FILES/all.yaml")
    assert done.code == 4
    assert "delete networkpolicies shop/red: there is none" in done.err
    assert len(done.lines) == 1 + 6
    assert done.lines[-1][:3] == ["namespaces", "-", "shop"], "the namespace comes last"
    assert filled.run("get ns --no-headers").lines == []


def test_delete_of_a_namespace_with_policies_is_a_conflict(filled: Shell) -> None:
    done = filled.run("delete ns shop")
    assert done.code == 5
    assert "it has 2 networkpolicies" in done.err


# ------------------------------------------------------------------ who is asked


def test_a_store_that_is_not_there_is_out_of_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    for line in ("get netpol", "describe netpol a", "delete netpol a"):
        with pytest.raises(SystemExit) as leave:
            main([*line.split(), "--store", url])
        assert leave.value.code == 3
        assert "there is none" in capsys.readouterr().err
    with pytest.raises(SystemExit) as leave:
        main(["get", "netpol", "--store", "redis://h:1"])
    assert leave.value.code == 2
    with pytest.raises(SystemExit) as leave:
        main(["get", "netpol", "--agent", str(tmp_path / "none.sock")])
    assert leave.value.code == 3
    assert list(tmp_path.iterdir()) == []


def test_of_a_lab_the_first_agent_that_answers_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("podwire.cli.options.LAB_ROOT", tmp_path)
    lab = tmp_path / "demo"
    for node in ("node1", "node2"):
        (lab / node).mkdir(parents=True)
        (lab / node / "agent.toml").touch()
    (lab / "lab.json").touch()
    (lab / "a.yaml").write_text(dump([network_policy("a")]))
    with (
        contextlib.closing(SqliteStore(lab / "store.db")) as store,
        serving_objects(lab / "node2" / "api.sock", store),
    ):
        with pytest.raises(SystemExit) as leave:
            main(["apply", "-f", str(lab / "a.yaml"), "--lab", "demo", "-o", "name"])
        assert leave.value.code == 0
        assert capsys.readouterr().out == "networkpolicies/default/a\n"
        assert store.list("networkpolicies")[1] == 1


def test_validate_files_needs_nobody(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(dump([network_policy("a", "nowhere"), cidr_group()]))
    assert validate_files([str(path)]) == ["networkpolicies nowhere/a", "ciliumcidrgroups office"]
    path.write_text(dump([network_policy("A")]))
    with pytest.raises(CliError) as caught:
        validate_files([str(path)])
    assert caught.value.exit_code == 6
    assert (
        f"{path}:4 (document 1, NetworkPolicy default/A) metadata.name is 'A', not a name"
        in caught.value.message
    )

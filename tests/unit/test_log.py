"""Log lines: one line each, known facts, constant messages."""

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.model import log

ROOT = Path(__file__).resolve().parents[2]
METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
HOSTILE = 'a b\n2026-01-01T00:00:00Z ERROR forged pod="x"\x1b[31m\u2028'


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    names = (log.ROOT_LOGGER, "asyncio", "aiohttp")
    before = {name: logging.getLogger(name).__dict__.copy() for name in names}
    raising = logging.raiseExceptions
    yield io.StringIO()
    logging.raiseExceptions = raising
    for name, state in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = state["handlers"], state["propagate"]
        logger.setLevel(state["level"])


def test_text_line_has_time_level_message_and_facts_in_order(stream: io.StringIO) -> None:
    log.configure("info", "text", stream)
    logging.getLogger("podwire.x").info("attached", extra={"ms": 1.23456, "container": "c1"})
    time, level, rest = stream.getvalue().split(maxsplit=2)
    assert time.endswith("Z")
    assert level == "INFO"
    assert rest == "attached container=c1 ms=1.235\n"


def test_json_line_has_time_level_logger_message_and_facts(stream: io.StringIO) -> None:
    log.configure("info", "json", stream)
    logging.getLogger("podwire.x").warning("odd", extra={"endpoint": 7})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "podwire.x",
        "message": "odd",
        "endpoint": 7,
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_hostile_name_cannot_forge_a_line(form: str, stream: io.StringIO) -> None:
    log.configure("info", form, stream)
    logging.getLogger("podwire.x").info("attached", extra={"pod": HOSTILE})
    text = stream.getvalue()
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


def test_facts_that_are_not_listed_are_left_out(stream: io.StringIO) -> None:
    log.configure("info", "json", stream)
    logging.getLogger("podwire.x").info("attached", extra={"password": "x"})
    assert "password" not in stream.getvalue()


def test_level_is_changed_in_place(stream: io.StringIO) -> None:
    log.configure("warning", "text", stream)
    logger = logging.getLogger("podwire.x")
    logger.info("unseen")
    log.set_level("debug")
    logger.debug("seen")
    assert "unseen" not in stream.getvalue()
    assert "seen logger=podwire.x" in stream.getvalue()


def test_a_traceback_stays_with_its_line(stream: io.StringIO) -> None:
    log.configure("info", "json", stream)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("podwire.x").exception("task failed")
    assert "RuntimeError: boom" in json.loads(stream.getvalue())["traceback"]


def test_a_full_disk_under_the_log_is_no_error(stream: io.StringIO) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log.configure("info", "text", Full())
    logging.getLogger("podwire.x").info("attached")
    assert stream.getvalue() == ""


def _log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted((ROOT / "podwire").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in METHODS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in {"_log", "log", "logger"}
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_message_in_the_source_is_constant_and_every_fact_is_listed() -> None:
    wrong = []
    for place, call in _log_calls():
        if len(call.args) != 1 or not isinstance(call.args[0], ast.Constant):
            wrong.append(f"{place}: the message is not one constant text")
        for keyword in call.keywords:
            if keyword.arg != "extra" or not isinstance(keyword.value, ast.Dict):
                continue
            for key in keyword.value.keys:
                if isinstance(key, ast.Constant) and key.value not in log.FIELDS:
                    wrong.append(f"{place}: {key.value!r} is not in model/log.py FIELDS")
    assert not wrong, "\n".join(wrong)


def test_a_line_costs_no_look_at_the_caller(stream: io.StringIO) -> None:
    log.configure("info", "json", stream)
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return True

    logging.getLogger("podwire").handlers[0].addFilter(keep)
    logging.getLogger("podwire.x").info("attached")
    (record,) = records
    assert (record.lineno, record.threadName, record.process) == (0, None, None)

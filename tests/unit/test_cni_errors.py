"""Error JSON: every kind of error has its number, and the message carries everything a person needs."""

import json
from collections.abc import Iterator

import pytest

from podwire.cni.errors import CODES, DETAILS_MAX_CHARACTERS, code_of, encode_error
from podwire.model import errors
from podwire.model.errors import Fault, KernelFailure, PodwireError

# The numbers of the outer contract. A kind that is missing here is missing there.
NUMBERS = {
    "version": 1,
    "unsupported-field": 2,
    "unknown-container": 3,
    "environment": 4,
    "io": 5,
    "decode": 6,
    "configuration": 7,
    "invalid": 7,
    "unavailable": 11,
    "cancelled": 11,
    "cannot-serve": 50,
    "impaired": 51,
    "exhausted": 100,
    "address": 101,
    "policy-overflow": 102,
    "unsupported": 103,
    "check": 104,
    "internal": 110,
    "not-found": 110,
    "conflict": 110,
    "foreign": 110,
    "newer-data": 110,
    "bug": 110,
    "kernel": 110,
}


def list_error_classes(base: type[PodwireError] = PodwireError) -> Iterator[type[PodwireError]]:
    """Give every error class of the model."""
    yield base
    for subclass in base.__subclasses__():
        yield from list_error_classes(subclass)


def test_every_kind_of_error_has_its_number() -> None:
    kinds = {
        error_class.kind
        for error_class in list_error_classes()
        if error_class.__module__ == errors.__name__
    }
    assert kinds == set(NUMBERS)
    assert dict(CODES) == NUMBERS


def test_every_class_of_the_program_has_a_code() -> None:
    for error_class in list_error_classes():
        if error_class.__module__.startswith(("podwire.lab.", "podwire.cni.launcher")):
            continue  # says what a launcher answered, and never becomes an answer itself
        assert error_class.kind in CODES, error_class


def make(kind: type[PodwireError]) -> PodwireError:
    return KernelFailure(1, "x", "y") if kind is KernelFailure else kind("do it: it failed")


@pytest.mark.parametrize(
    "kind",
    [
        error_class
        for error_class in list_error_classes()
        if error_class.__module__ == errors.__name__
    ],
    ids=lambda kind: kind.kind,
)
def test_an_error_is_written_with_version_code_and_message(kind: type[PodwireError]) -> None:
    written = json.loads(encode_error("0.4.0", make(kind)))
    assert (written["cniVersion"], written["code"]) == ("0.4.0", NUMBERS[kind.kind])
    assert written["msg"]


@pytest.mark.parametrize("version", ["", "2.0.0", "x"])
def test_an_error_is_written_in_the_newest_version_when_the_asked_is_unknown(version: str) -> None:
    assert json.loads(encode_error(version, PodwireError("x")))["cniVersion"] == "1.1.0"


def test_details_have_every_fault_and_the_hint() -> None:
    faults = (Fault("mtu", "is 5"), Fault("", "device is gone"))
    written = json.loads(encode_error("1.1.0", PodwireError("x", hint="do y", faults=faults)))
    assert written["details"] == "mtu is 5\ndevice is gone\ndo y"


def test_the_hint_survives_however_many_faults_there_are() -> None:
    faults = (Fault("labels", "x" * 100),) * 10_000
    written = json.loads(encode_error("1.1.0", PodwireError("x", hint="do y", faults=faults)))
    assert written["details"].endswith("\ndo y")
    assert len(written["details"]) <= DETAILS_MAX_CHARACTERS


def test_what_is_no_text_of_utf8_can_still_be_written() -> None:
    assert code_of(PodwireError("\udcff")) == 110
    assert json.loads(encode_error("1.1.0", PodwireError("\udcff\n\0")))["msg"] == "\udcff\n\0"

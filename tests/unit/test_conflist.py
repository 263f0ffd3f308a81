"""The conflist: what it says, and that a runtime never sees half of it."""

import json
import os
from pathlib import Path

import pytest

from podwire.cni.conflist import (
    FILE_NAME,
    PORTMAP,
    choose_versions,
    encode_conflist,
    install_conflist,
    list_earlier_files,
    make_plugin,
    remove_conflist,
)
from podwire.cni.netconf import decode_request
from podwire.model.errors import InvalidConfiguration, StorageFailure


def test_the_list_names_versions_network_and_plugins() -> None:
    written = json.loads(encode_conflist([make_plugin(), PORTMAP], ["1.0.0", "1.1.0"]))
    assert written == {
        "cniVersion": "1.0.0",
        "cniVersions": ["1.0.0", "1.1.0"],
        "name": "podwire",
        "plugins": [
            {"type": "podwire-cni", "capabilities": {"bandwidth": True, "ips": True, "mac": True}},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def test_our_own_entry_is_a_configuration_that_we_accept() -> None:
    plugin = make_plugin(socket="/run/other/cni.sock", mtu=1400)
    stdin = json.dumps({"cniVersion": "1.0.0", "name": "podwire", **plugin}).encode()
    env = {"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "c", "CNI_NETNS": "/n", "CNI_IFNAME": "eth0"}
    request = decode_request(env, stdin, 1)
    assert (request.mtu, request.unknown_keys) == (1400, ())


OURS = ("0.4.0", "1.0.0", "1.1.0")


@pytest.mark.parametrize(
    ("spoken", "versions"),
    [
        ([OURS], ("1.0.0", "1.1.0")),
        ([OURS, ("0.4.0", "1.0.0")], ("1.0.0",)),
        ([OURS, ("1.0.0", "1.1.0", "9.0.0")], ("1.0.0", "1.1.0")),
    ],
    ids=["all", "an older plugin", "a newer plugin"],
)
def test_versions_are_those_that_every_plugin_speaks(
    spoken: list[tuple[str, ...]], versions: tuple[str, ...]
) -> None:
    assert choose_versions(spoken) == versions


def test_a_chain_with_a_plugin_of_the_past_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match=r"1\.0\.0"):
        choose_versions([OURS, ("0.4.0",)])


def test_a_network_name_with_a_path_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="no network name"):
        encode_conflist([make_plugin()], name="../x")


def test_installing_replaces_by_rename_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    directory = tmp_path / "net.d"
    assert install_conflist(directory, b"first")
    inode = (directory / FILE_NAME).stat().st_ino
    with (directory / FILE_NAME).open("rb") as still_open:
        assert install_conflist(directory, b"second")
        assert still_open.read() == b"first"
    assert (directory / FILE_NAME).read_bytes() == b"second"
    assert (directory / FILE_NAME).stat().st_ino != inode
    assert (directory / FILE_NAME).stat().st_mode & 0o777 == 0o644
    assert os.listdir(directory) == [FILE_NAME]


def test_installing_what_is_there_touches_nothing(tmp_path: Path) -> None:
    install_conflist(tmp_path, b"same")
    before = (tmp_path / FILE_NAME).stat()
    assert not install_conflist(tmp_path, b"same")
    assert (tmp_path / FILE_NAME).stat().st_ino == before.st_ino


def test_a_failed_installation_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StorageFailure, match="install network configuration"):
        install_conflist(tmp_path, b"x")
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_removing_twice_is_no_error(tmp_path: Path) -> None:
    install_conflist(tmp_path, b"x")
    assert remove_conflist(tmp_path)
    assert not remove_conflist(tmp_path)


def test_files_that_win_over_ours_are_named(tmp_path: Path) -> None:
    assert list_earlier_files(tmp_path / "absent") == []
    for name in ("00-other.conf", "04-x.conflist", "05-podwire.conflist", "10-late.conf", "01.txt"):
        (tmp_path / name).touch()
    assert list_earlier_files(tmp_path) == ["00-other.conf", "04-x.conflist"]

"""Folders for sockets: where they are made, and what is removed."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.platform import socket_folder
from hearth.platform.socket_folder import SocketFolder, remove_leftovers

OLD = time.time() - 61
# Makes a folder with a socket in it, and waits.
_PROGRAM = """
import socket, sys
from hearth.platform.socket_folder import SocketFolder
folder = SocketFolder("hearth-test-")
socket.socket(socket.AF_UNIX).bind(str(folder.path / "worker"))
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parents(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two temporary folders, with paths that are short enough for sockets."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        monkeypatch.setattr(socket_folder, "_parents", lambda: [Path(first), Path(second)])
        yield Path(first), Path(second)


def aged(path: Path, at: float = OLD) -> Path:
    os.utime(path, (at, at))
    return path


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_folder_is_private_and_removed_with_its_sockets(parents: tuple[Path, Path]) -> None:
    folder = SocketFolder("hearth-test-")
    assert folder.path.parent == parents[0]
    assert folder.path.name.startswith("hearth-test-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not list(folder.path.iterdir())
    bind(folder.path / "worker")
    folder.remove()
    folder.remove()
    assert not list(parents[0].iterdir())


def test_folder_is_removed_when_nobody_needs_it_any_more(parents: tuple[Path, Path]) -> None:
    folder = SocketFolder("hearth-test-")
    assert folder.path.is_dir()
    del folder
    assert not list(parents[0].iterdir())


def test_folder_of_a_process_stays_until_that_is_killed(parents: tuple[Path, Path]) -> None:
    environment = {**os.environ, "TMPDIR": str(parents[0])}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        path = aged(Path(process.stdout.readline().strip()))
        remove_leftovers(parents[0], "hearth-test-")
        assert list(path.iterdir()) == [path / "worker"]
        process.kill()
    assert path.is_dir()
    folder = SocketFolder("hearth-test-")
    assert list(parents[0].iterdir()) == [folder.path]


def test_only_old_folders_of_sockets_with_the_prefix_are_removed(parents: tuple[Path, Path]) -> None:
    parent, _ = parents
    for name in ("hearth-test-empty", "hearth-test-socket", "hearth-test-new", "hearth-test-files", "hearth-other-x"):
        (parent / name).mkdir()
    bind(parent / "hearth-test-socket" / "worker")
    (parent / "hearth-test-files" / "kept").write_text("of a user")
    (parent / "hearth-test-file").write_text("")
    target = parents[1] / "target"
    target.mkdir()
    bind(target / "s")
    (parent / "hearth-test-link").symlink_to(target)
    for each in (target, *parent.iterdir()):
        aged(each)
    aged(parent / "hearth-test-new", time.time())
    remove_leftovers(parent, "hearth-test-")
    assert {path.name for path in parent.iterdir()} == {
        "hearth-test-new", "hearth-test-files", "hearth-test-file", "hearth-test-link", "hearth-other-x",
    }  # fmt: skip
    assert (parent / "hearth-test-files" / "kept").read_text() == "of a user"
    assert (target / "s").is_socket()


def test_folder_of_another_user_is_not_removed(parents: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    left = parents[0] / "hearth-test-left"
    left.mkdir()
    aged(left)
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    remove_leftovers(parents[0], "hearth-test-")
    assert left.is_dir()
    monkeypatch.undo()
    remove_leftovers(parents[0], "hearth-test-")
    assert not left.exists()


def test_errors_while_leftovers_are_removed_are_ignored(parents: tuple[Path, Path]) -> None:
    remove_leftovers(parents[0] / "absent", "hearth-test-")


@pytest.mark.parametrize("fault", ["absent", "long path", "no locks"])
def test_next_temporary_folder_is_used_if_the_first_takes_no_sockets(
    fault: str, parents: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = parents
    if fault == "absent":
        first /= "absent"
    elif fault == "long path":
        first /= "x" * 108
        first.mkdir()
    else:
        locks = iter([OSError(95, "Operation not supported")])

        def flock(descriptor: int, operation: int) -> None:
            if (error := next(locks, None)) is not None:
                raise error

        monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(socket_folder, "_parents", lambda: [first, second])
    assert SocketFolder("hearth-test-").path.parent == second
    assert not first.exists() or not list(first.iterdir())
    assert f"{second} is used for sockets, because others take none ({first}: " in caplog.text


def test_error_names_all_folders_that_were_tried(parents: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    absent = [parent / "absent" for parent in parents]
    monkeypatch.setattr(socket_folder, "_parents", lambda: absent)
    with pytest.raises(OSError, match=f"{absent[0]}: No such file or directory; {absent[1]}: No such file"):
        SocketFolder("hearth-test-")

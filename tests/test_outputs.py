"""Output files: all of it or nothing, nothing left beside it, and a full disk ends no measurement."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from full_disk import Disk, disk
from smoothctx.bench import ttft_file, ttft_report
from smoothctx.cli import main
from smoothctx.errors import ConfigurationError
from smoothctx.outputs import Output, check_file, check_folder, write_whole

__all__ = ("disk",)


def test_a_write_that_fails_leaves_everything_as_it_was(tmp_path: Path, disk: Disk) -> None:
    """The old file whole, and no part of the new one."""
    file = tmp_path / "x.json"
    file.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "newer")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
    disk.full = False
    write_whole(file, "newer")
    assert file.read_bytes() == b"newer" and list(tmp_path.iterdir()) == [file]


def test_an_interrupted_write_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the writing and the renaming as well."""

    def interrupted(path: Path, target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x.json", "new")
    assert not list(tmp_path.iterdir())


def test_links_stay_links_and_devices_stay_devices(tmp_path: Path) -> None:
    """What a link points to is written; what is no file at all is not replaced by one."""
    file, link, device = tmp_path / "x.json", tmp_path / "link", tmp_path / "device"
    link.symlink_to(file)
    device.symlink_to(os.devnull)
    for place in (link, device):
        check_file("--json", place)
        write_whole(place, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert device.is_symlink() and Path(os.devnull).is_char_device()


def test_a_place_that_takes_no_file_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    """Whatever its permissions say; the trial leaves nothing."""
    check_file("--json", tmp_path / "x.json")
    check_file("--json", None)
    assert not list(tmp_path.iterdir())
    (tmp_path / "y.json.part").mkdir()
    for place in (Path("/proc/x.json"), tmp_path / ("n" * 300), tmp_path / "y.json"):
        with pytest.raises(ConfigurationError, match=f"^--json {re.escape(str(place))}: "):
            check_file("--json", place)
    check_folder("--plots", tmp_path)
    check_folder("--plots", None)
    for folder in (Path("/proc"), tmp_path / "none"):
        with pytest.raises(ConfigurationError, match=f"^--plots {re.escape(str(folder))}: "):
            check_folder("--plots", folder)
    assert [p.name for p in tmp_path.iterdir()] == ["y.json.part"]


def test_a_failure_is_said_once_until_a_write_works_again(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit code tells of the last one."""
    out = Output("--json", tmp_path / "x.json")
    for full in (True, True, False, True, True):
        disk.full = full
        out.write(f"{full}")
    said = capsys.readouterr()
    assert said.err.count("smoothctx: --json") == said.err.count("could not be written (No space") == 2
    assert out.close("figures") == 1 and "x.json was NOT written" in capsys.readouterr().out
    assert (tmp_path / "x.json").read_text() == "False", "what was written last stays"
    disk.full = False
    out.write("again")
    assert out.close("figures") == 0 and "NOT" not in capsys.readouterr().out
    nothing = Output("--json", None)
    nothing.write("x")
    assert nothing.close("figures") == 0 and capsys.readouterr() == ("", "")


def test_no_command_ends_with_a_traceback_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where our own output cannot be written."""

    def full(data: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ttft_report, "text", full)
    monkeypatch.setattr(ttft_file, "read", lambda file: {})
    assert main(["bench", "ttft", "--report", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == "smoothctx: [Errno 28] No space left on device\n"

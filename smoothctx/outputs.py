"""Output files of the commands: what is wrong with one is said before anything is measured, and ends nothing later."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from .errors import ConfigurationError


def check_file(option: str, file: Path | None) -> None:
    """Can this file be written? It is tried beside it, and nothing is left there; ``None`` is fine.

    Raises:
        ConfigurationError: naming the option and what is in the way.
    """
    if file is None:
        return
    try:
        place = file.absolute()
        if not place.parent.is_dir():
            raise ConfigurationError(f"{option} {file}: the folder {place.parent} does not exist")
        if place.is_dir():
            raise ConfigurationError(f"{option} {file}: that is a folder")
        if place.exists() and not os.access(place, os.W_OK):
            raise ConfigurationError(f"{option} {file}: it cannot be written")
        if not _special(place):
            part = _part(place)
            part.touch()
            part.unlink()
    except OSError as error:
        raise ConfigurationError(f"{option} {file}: it cannot be written ({_why(error)})") from error


def check_folder(option: str, folder: Path | None) -> None:
    """Can files be written into this folder? One is tried, and not left there; ``None`` is fine.

    Raises:
        ConfigurationError: naming the option and what is in the way.
    """
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigurationError(f"{option} {folder}: there is no such folder")
    try:
        part = _part(folder / "smoothctx")
        part.touch()
        part.unlink()
    except OSError as error:
        raise ConfigurationError(f"{option} {folder}: nothing can be written there ({_why(error)})") from error


class Output:
    """A file that a command writes, once or again and again while it measures.

    A write that fails is said on stderr and ends nothing: what was measured is still shown. It is said once, until one
    works again. ``failed`` says that the last write did.
    """

    def __init__(self, option: str, file: Path | None) -> None:
        self.option, self.file = option, file
        self.failed = False

    def write(self, text: str) -> None:
        """All of it or nothing; nothing without a file."""
        if self.file is None:
            return
        try:
            write_whole(self.file, text)
        except OSError as error:
            if not self.failed:
                print(
                    f"smoothctx: {self.option} {self.file}: it could not be written ({_why(error)}); what is measured "
                    "is shown all the same",
                    file=sys.stderr,
                    flush=True,
                )
            self.failed = True
        else:
            self.failed = False

    def close(self, what: str) -> int:
        """Say at the end where ``what`` stands, or that it does not. Returns the exit code: 1 if the write failed."""
        if self.file is not None:
            print(f"{what}: {self.file}" + (" was NOT written" if self.failed else ""))
        return int(self.failed)


def write_whole(file: Path, text: str) -> None:
    """All of it or nothing: whatever goes wrong leaves the file as it was, and nothing beside it.

    Raises:
        OSError: it cannot be written, or not all of it.
    """
    if _special(file):  # a pipe or a device is not replaced by a file
        file.write_text(text, encoding="utf-8")
        return
    part = _part(file)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(os.path.realpath(file))
    finally:  # also when interrupted; after a replace there is none
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _special(file: Path) -> bool:
    return file.exists() and not file.is_file()


def _part(file: Path) -> Path:
    """Where it is written first: beside what a link points to."""
    place = Path(os.path.realpath(file))
    return place.with_name(place.name + ".part")


def _why(error: OSError) -> str:
    return error.strerror or str(error)

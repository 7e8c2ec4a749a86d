"""Output files of the commands: whatever is wrong with one is said before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigurationError


def check_file(option: str, file: Path | None) -> None:
    """Can this file be written? Nothing is written yet; ``None`` is fine.

    Raises:
        ConfigurationError: naming the option and what is in the way.
    """
    if file is None:
        return
    place = file.absolute()
    if not place.parent.is_dir():
        raise ConfigurationError(f"{option} {file}: the folder {place.parent} does not exist")
    if place.is_dir():
        raise ConfigurationError(f"{option} {file}: that is a folder")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ConfigurationError(f"{option} {file}: it cannot be written")


def check_folder(option: str, folder: Path | None) -> None:
    """Can files be written into this folder? ``None`` is fine.

    Raises:
        ConfigurationError: naming the option and what is in the way.
    """
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigurationError(f"{option} {folder}: there is no such folder")
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{option} {folder}: nothing can be written there")


def write_whole(file: Path, text: str) -> None:
    """All of it or nothing: an interruption leaves the file as it was."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)

"""A full disk, for tests of what is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


class Disk:
    """Takes nothing while it is ``full`` but the first half of a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        real = Path.write_text

        def write_text(path: Path, text: str, **options: str) -> int:
            if not self.full:
                return real(path, text, **options)
            real(path, text[: len(text) // 2], **options)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr(Path, "write_text", write_text)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A full one."""
    return Disk(monkeypatch)

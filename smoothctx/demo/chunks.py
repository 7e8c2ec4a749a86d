"""Chunks: the files of a folder, cut into turns of about the same number of tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: how far a turn may be off its target
TOLERANCE = 0.1
_SUFFIXES = frozenset(
    ".c .cc .cfg .cpp .css .go .h .hpp .html .ini .java .js .json .kt .md .php .py .rb .rs .rst .scala .sh .sql .swift "
    ".toml .ts .tsx .txt .yaml .yml".split()
)
_SKIPPED = frozenset({"__pycache__", "node_modules", "dist", "build", "site-packages"})
_MAX_FILE = 2 * 2**20

Count = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One turn's text: which file, which part of it, and its size in tokens as the engine counts."""

    file: str
    part: int
    text: str
    tokens: int


def files(folder: Path) -> Iterator[tuple[str, str]]:
    """Readable text files below ``folder`` in a stable order: name and text."""
    paths = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    for path in paths:
        inside = path.relative_to(folder).parts if path != folder else (path.name,)
        hidden = any(part.startswith(".") or part in _SKIPPED for part in inside)
        if hidden or (path != folder and path.suffix.lower() not in _SUFFIXES) or path.stat().st_size > _MAX_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield "/".join(inside), text


async def chunks(folder: Path, *, turns: int, tokens: int, count: Count) -> list[Chunk]:
    """Up to ``turns`` chunks of ``tokens`` tokens each, within 10%. Fewer when the folder holds less text.

    A file that ends before its chunk is full leaves the rest of it to the next file.
    """
    found: list[Chunk] = []
    rest = ""
    for name, text in files(folder):
        rest = f"{rest}# {name}\n{text.strip()}\n"
        part = 0
        while len(found) < turns:
            head, size = await _cut(rest, tokens, count)
            if size < tokens * (1 - TOLERANCE):
                break  # the file is used up
            part += 1
            found.append(Chunk(name, part, head, size))
            rest = rest[len(head) :]
        if len(found) == turns:
            break
    return found


async def _cut(text: str, tokens: int, count: Count) -> tuple[str, int]:
    """The longest head of at most about ``tokens`` tokens, ending at a line where that is near enough."""
    length = min(len(text), tokens * 3)
    size = 0
    for _ in range(12):
        size = await count(text[:length])
        if length == len(text) and size <= tokens:
            return text, size
        if tokens * 0.97 <= size <= tokens:
            break
        length = min(len(text), max(1, int(length * tokens * 0.985 / max(1, size))))
    line = text.rfind("\n", 0, length) + 1
    if line > length * 0.93:
        shorter = await count(text[:line])
        if shorter >= tokens * (1 - TOLERANCE):
            return text[:line], shorter
    return text[:length], size

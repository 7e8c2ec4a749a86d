"""Volatile prefixes: what changes from one rendering of a prompt to the next, and so ends the cached prefix there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import anyio

from ..errors import ConfigurationError
from .findings import Finding, seconds

#: what usually changes, most telling first
_KINDS = (
    ("a uuid", re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")),
    ("a time of day", re.compile(r"\b\d{1,2}:\d{2}(?::\d{2})?\b")),
    ("a date", re.compile(r"\b\d{4}-\d{2}-\d{2}\b")),
    ("a Unix time", re.compile(r"\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b")),
)
#: seconds between two runs of a command: a clock that shows seconds has moved on
PAUSE_S = 1.1
#: seconds that a command may take
_COMMAND_S = 60.0
_MOVE = (
    "move it behind the conversation, into the newest message, or round it to what the task needs: the prefix cache "
    "ends at the first character that changes"
)


async def renders(files: Sequence[Path], command: str | None, *, pause_s: float = PAUSE_S) -> list[str]:
    """The texts to compare: of the files, or of two runs of a shell command.

    Raises:
        ConfigurationError: when a file cannot be read, or the command fails.
    """
    texts: list[str] = []
    for file in files:
        try:
            texts.append(await anyio.Path(file).read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise ConfigurationError(f"--prompt {file}: {error.strerror or error}") from None
    for run in range(2 if command is not None else 0):
        if run:
            await anyio.sleep(pause_s)
        assert command is not None
        try:
            with anyio.fail_after(_COMMAND_S):
                done = await anyio.run_process(["/bin/sh", "-c", command], check=False)
        except TimeoutError:
            raise ConfigurationError(f"--prompt-command {command!r}: not done after {_COMMAND_S:g} s") from None
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip()[-200:]
            raise ConfigurationError(f"--prompt-command {command!r}: exit code {done.returncode}: {said}")
        texts.append(done.stdout.decode("utf-8", "replace"))
    return texts


def check(texts: Sequence[str], *, chars_per_s: float | None = None) -> Finding:
    """Compare renderings of one prompt; a single one is searched for what looks volatile.

    ``chars_per_s`` is the measured prefill rate in characters, for the effect.
    """
    name = "volatile prefix"
    if not texts:
        return Finding(
            name=name,
            status="unknown",
            found="no prompt was given",
            advice="render your prompt twice and let it be compared: --prompt A --prompt B, or --prompt-command",
        )
    if len(texts) == 1:
        return _suspects(name, texts[0])
    first, size = texts[0], max(map(len, texts))
    others = [t for t in texts if t != first]
    if not others:
        return Finding(name=name, status="ok", found=f"{len(texts)} renderings of {size:,} characters are the same")
    other = min(others, key=lambda t: differs(first, t))  # of all pairs this one differs first
    offset = differs(first, other)
    shown = [t[max(0, offset - 24) : offset + 24] for t in (first, other)]
    what = next((kind for kind, found in _KINDS if any(_at(found, t, offset) for t in (first, other))), "something")
    again = (size - offset) / chars_per_s if chars_per_s else None
    cost = f"; the {size - offset:,} characters after it are evaluated anew each turn" + (
        f", about {seconds(again)}" if again else ""
    )
    return Finding(
        name=name,
        status="bad",
        found=f"the renderings differ at offset {offset:,} of {size:,}, where {what} stands: {shown[0]!r} against "
        f"{shown[1]!r}{cost}",
        advice=f"{what} at offset {offset:,} of the prompt changes between turns: {_MOVE}",
        effect_s=again,
        data={"offset": offset, "characters": size, "kind": what, "shown": shown},
    )


def differs(a: str, b: str) -> int:
    """The offset of the first difference; the shorter one's length where that is its beginning."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _at(pattern: re.Pattern[str], text: str, offset: int) -> bool:
    """Does something of this kind stand at the offset?"""
    start = max(0, offset - 40)
    return any(m.start() + start <= offset < m.end() + start for m in pattern.finditer(text[start : offset + 40]))


def _suspects(name: str, text: str) -> Finding:
    hits = sorted((m.start(), kind, m.group()) for kind, pattern in _KINDS for m in pattern.finditer(text))
    if not hits:
        return Finding(
            name=name,
            status="unknown",
            found=f"nothing in the {len(text):,} characters looks like a clock or an id; one rendering proves nothing",
            advice="give a second rendering to compare with, or --prompt-command",
        )
    listed = "; ".join(f"{kind} at offset {offset:,} ({value})" for offset, kind, value in hits[:5])
    return Finding(
        name=name,
        status="warn",
        found=f"what may change from turn to turn: {listed}",
        advice=f"if it does change, {_MOVE}",
        data={"offset": hits[0][0], "characters": len(text), "kind": hits[0][1]},
    )

"""Offload: big tool results go to the store; a preview and an id stay in the context."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from ..codec import Codec, results_of, with_results
from ..errors import ConfigurationError, TransformError
from ..store import Store, check_store
from ..tokens import count_text
from .base import Locality, Rewrite, Size, TransformRequest, fingerprint
from .facts import pin, pinned
from .inputs import call_names, head, plain

TOOL_NAME = "retrieve"
#: characters that one retrieve returns by default, and at most
PAGE, MAX_PAGE = 8_000, 20_000
ID_CHARS = 24
_ID = re.compile(rf"[0-9a-f]{{{ID_CHARS}}}")
_STUB = re.compile(rf"\[offloaded: \d+ characters, about \d+ tokens; {TOOL_NAME}\(id=\"[0-9a-f]{{{ID_CHARS}}}\"")
_PAGE_HEAD = re.compile(rf"\[{TOOL_NAME} id=[0-9a-f]{{{ID_CHARS}}}: characters \d+ to \d+ of \d+")
_KEPT_PARTS = frozenset(
    "image image_url input_image audio input_audio video video_url file input_file document".split()
)

#: the tool that an agent is given to read offloaded content again (OpenAI function schema)
TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Read a tool result that was moved out of the conversation. "
        "Its id stands in the note that was left in its place.",
        "parameters": {
            "type": "object",
            "properties": {
                "id": {
                    "type": "string",
                    "description": f"The id from the note: {ID_CHARS} hexadecimal characters.",
                },
                "offset": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "First character to read (default 0).",
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MAX_PAGE,
                    "description": f"How many characters to read (default {PAGE}).",
                },
            },
            "required": ["id"],
            "additionalProperties": False,
        },
    },
}


class Offload:
    """Puts big tool results into the store and leaves a stub: a preview, the size, and the id to read it by.

    Args:
        store: where the content goes; by default the runtime's store.
        min_tokens: smaller results stay.
        keep_recent: that many of the latest tool results stay, whatever their size; in a message with several
            each counts.
        preview_tokens: how much of the beginning stays in the stub.
        redact: called on each text before anything of it is stored or shown, e.g. to remove secrets.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    name = "offload"
    locality = Locality.SEGMENT
    source = "view"
    keep: Size = ("messages", 0)
    #: declare this tool from the first turn on: adding one later re-bills the whole prefix
    tool_schema = TOOL_SCHEMA

    def __init__(
        self,
        *,
        store: Store | None = None,
        min_tokens: int = 1024,
        keep_recent: int = 1,
        preview_tokens: int = 64,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        numbers = {"min_tokens": min_tokens, "keep_recent": keep_recent, "preview_tokens": preview_tokens}
        for option, value in numbers.items():
            least = 1 if option == "min_tokens" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{option}={value!r}: expected a whole number of at least {least}")
        if store is not None:
            check_store(store)
        if redact is not None and not callable(redact):
            raise ConfigurationError(f"redact={redact!r}: expected a callable (str) -> str, or None")
        self.min_tokens, self.keep_recent, self.preview_tokens = min_tokens, keep_recent, preview_tokens
        self.redact = redact
        #: the store given at construction, if any
        self.store = store
        self._bound: Store | None = store
        # What a redact hook does cannot be known: its results stay private to this object.
        self.fingerprint: str | None = None if redact else fingerprint(self.name, numbers)

    def bind(self, store: Store) -> None:
        """Where :meth:`retrieve` reads from, unless a store was given at construction."""
        if self.store is None:
            self._bound = store

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Offload what is big; everything else is passed on as the same objects.

        Raises:
            TransformError: without a store.
            StoreError: when the content could not be stored; nothing is replaced then.
        """
        codec = request.codec
        store = self.store if self.store is not None else request.store
        if store is None:
            raise TransformError("offload: there is no store; give Offload(store=...) or a runtime with one")
        self.bind(store)
        out = list(request.messages)
        names = call_names(request.messages, codec)
        each = [names.get(id(message), ()) for message in out]
        left = sum(map(len, each)) - self.keep_recent  # results that are not among the latest
        for i, (message, called) in enumerate(zip(request.messages, each, strict=True)):
            stay = {k for k, name in enumerate(called) if k >= left or name == TOOL_NAME}
            left -= len(called)
            if len(stay) == len(called):
                continue
            made = offload_results(
                message,
                codec,
                stay=stay,
                max_tokens=self.min_tokens,
                preview_tokens=self.preview_tokens,
                redact=self.redact,
                pins=request.pins,
            )
            if made is not None:
                out[i], contents = made
                for content_id, content in contents:
                    await store.put(request.tenant, content_id, content)
        return Rewrite(messages=out)

    async def retrieve(self, id: str, offset: int = 0, limit: int = PAGE, *, tenant: str = "default") -> str:
        """The ``retrieve`` tool: a page of offloaded content. Errors come back as text, for the model."""
        if self._bound is None:
            return "error: nothing has been offloaded yet"
        return await retrieve(self._bound, id, offset, limit, tenant=tenant)

    def __repr__(self) -> str:
        return f"Offload(min_tokens={self.min_tokens}, keep_recent={self.keep_recent})"


class Readable(Protocol):
    """What ``retrieve`` needs of a store."""

    async def get(self, tenant: str, key: str) -> bytes | None:
        """The value, or ``None`` where there is none."""
        ...


async def retrieve(store: Readable, id: Any, offset: Any = 0, limit: Any = PAGE, *, tenant: str = "default") -> str:
    """A page of the content stored under ``id`` for this tenant, with a line that says what it is a page of.

    Never raises for what a model may pass: wrong arguments, unknown ids and store failures
    come back as text.
    """
    if not isinstance(id, str) or not _ID.fullmatch(id):
        return f"error: {str(id)[:80]!r} is not a content id; expected {ID_CHARS} hexadecimal characters"
    first, count = _whole(offset), _whole(limit)
    if first is None or first < 0:
        return f"error: offset={offset!r}: expected a number of characters of at least 0"
    if count is None or count < 1:
        return f"error: limit={limit!r}: expected a number of characters from 1 to {MAX_PAGE}"
    try:
        content = await store.get(tenant, id)
    except Exception as error:
        return f"error: the store could not be read: {type(error).__name__}"
    if content is None:
        return f"error: no offloaded content under id {id}"
    text = content.decode("utf-8", "surrogatepass")
    if first >= len(text):
        return f"error: offset={first}: the content has {len(text)} characters"
    end = min(len(text), first + min(count, MAX_PAGE))
    more = f"; read on with offset={end}" if end < len(text) else ""
    return f"[{TOOL_NAME} id={id}: characters {first} to {end} of {len(text)}{more}]\n{text[first:end]}"


def offload_results(
    message: Any,
    codec: Codec,
    *,
    stay: Container[int] = (),
    max_tokens: int,
    preview_tokens: int,
    redact: Callable[[str], str] | None = None,
    pins: Sequence[str] = (),
) -> tuple[Any, list[tuple[str, bytes]]] | None:
    """A tool message with a stub for each of its results that is too big, and what to store under which ids.

    Each result is judged on its own (:func:`offload_message`); those whose position is in ``stay`` are not.
    ``None`` when all stay.
    """
    parts = list(results_of(codec, message))
    contents: list[tuple[str, bytes]] = []
    for k, part in enumerate(parts):
        made = None
        if k not in stay:
            made = offload_message(
                part, codec, max_tokens=max_tokens, preview_tokens=preview_tokens, redact=redact, pins=pins
            )
        if made is not None:
            parts[k] = made[0]
            contents.append(made[1:])
    return (with_results(codec, message, parts), contents) if contents else None


def offload_message(
    message: Any,
    codec: Codec,
    *,
    max_tokens: int,
    preview_tokens: int,
    redact: Callable[[str], str] | None = None,
    pins: Sequence[str] = (),
) -> tuple[Any, str, bytes] | None:
    """The stub for one result, the id of its content and the content to store under it; purely local.

    ``None`` when the message stays: it is small enough, is such a stub or a page of offloaded content, or
    the stub would not be smaller. Pinned texts stay in the stub.
    """
    text = codec.text(message)
    cost = count_text(text) if not text.startswith("data:") else -(-len(text) // 4)
    if cost <= max_tokens or is_stub(text) or is_page(text):
        return None
    if redact is not None:
        text = redact(text)
    content = text.encode("utf-8", "surrogatepass")
    content_id = hashlib.blake2b(content, digest_size=ID_CHARS // 2).hexdigest()
    preview = head(plain(text), preview_tokens).rstrip() if preview_tokens else ""
    note = (
        f"[offloaded: {len(text)} characters, about {cost} tokens; "
        f'{TOOL_NAME}(id="{content_id}", offset=0) reads it page by page]'
    )
    kept = [pin(p) for p in pinned(text)]
    kept += [p for p in pins if p in text and pin_free(p, kept)]
    short = "\n".join([*([preview + " ..."] if preview else []), *kept, note])
    stub = _with_text(message, codec, short)
    if codec.estimate(stub) >= codec.estimate(message):
        return None
    return stub, content_id, content


def pin_free(text: str, kept: Sequence[str]) -> bool:
    """Is this text in none of those already kept?"""
    return not any(text in k for k in kept)


def is_stub(text: str) -> bool:
    """Is this the text of a stub that we made?"""
    start = text.rfind("[offloaded: ")
    return start >= 0 and text.endswith("page by page]") and _STUB.match(text, start) is not None


def has_stubs(codec: Codec, messages: Sequence[Any]) -> bool:
    """Does any of these messages hold a stub in the place of a result?"""
    results = (part for m in messages if codec.role(m) == "tool" for part in results_of(codec, m))
    return any(is_stub(codec.text(part)) for part in results)


def is_page(text: str) -> bool:
    """Is this a page that :func:`retrieve` returned?"""
    return len(text) <= MAX_PAGE + 200 and _PAGE_HEAD.match(text) is not None


def _with_text(message: Any, codec: Codec, text: str) -> Any:
    """The message with ``text`` in place of its text parts; media parts of a plain dict stay before it."""
    content = message.get("content") if isinstance(message, dict) else None
    media = (
        [p for p in content if isinstance(p, dict) and p.get("type") in _KEPT_PARTS]
        if isinstance(content, list)
        else []
    )
    stub = codec.with_text(message, text)
    if media and isinstance(stub, dict):
        # The text last: `is_stub` knows a stub by how its text ends.
        stub = {**stub, "content": [*media, {"type": "text", "text": text}]}
    return stub


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.strip()
        return int(value) if re.fullmatch(r"-?\d{1,15}", value) else None
    return int(value) if isinstance(value, int | float) and value == value and abs(value) < 1e15 else None

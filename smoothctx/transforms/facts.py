"""Durable facts: what a summary must carry word for word, found without a model.

A summary ends with one section of them:

    <durable_facts>
    tool: read_file
    path: src/app.py
    <pin>a text that the user marked</pin>
    </durable_facts>

``parse(render(facts)) == facts`` for every text: a value's own delimiters are escaped (and only those), and a
line break inside a one-line value is followed by a tab.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..codec import SUMMARY_TAG, Codec
from ..tokens import count_text

#: bounds of the section; pins, live tasks and tool names have bounds of their own
MAX_TOKENS = 600
QUOTA = {"paths": 14, "ids": 10, "decisions": 8, "urls": 6, "numbers": 10}
#: the kinds that are dropped first where there is too little room
MINOR = ("numbers", "urls")
MAX_TOOLS = 48
#: a pin inside a tool result is not the user's own typing: it is honoured up to this many characters
MAX_TOOL_PIN = 4_000
#: characters of one message that are looked at: its head and its tail
SCAN_HEAD, SCAN_TAIL = 14_000, 6_000
#: facts taken from one tool result, so that a listing does not crowd out everything else
PER_RESULT = 12
MAX_VALUE = 300
#: characters of a sentence that states a decision; a longer one is the model's to put in words
MAX_DECISION = 200

TAG = "durable_facts"
PIN_OPEN, PIN_CLOSE = "<pin>", "</pin>"
_KINDS = {
    "tool": "tools",
    "task": "tasks",
    "path": "paths",
    "id": "ids",
    "decision": "decisions",
    "url": "urls",
    "number": "numbers",
}
# In any spelling that the codec escapes.
_TAGS = rf"\s*(?:/\s*)?(?:{SUMMARY_TAG}|{TAG}|pin)"
_RAW = re.compile(f"(?:<|&((?:amp;)*)lt;)({_TAGS})", re.IGNORECASE)
_OURS = re.compile(f"<(/?(?:{TAG}|pin)>)")
_ESCAPED = re.compile(f"&((?:amp;)*)lt;({_TAGS})", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Durable facts by kind; within a kind the most important (mostly: the newest) stand last."""

    tools: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, kind) for kind in self.__slots__)


def pin(text: str) -> str:
    """Mark a text so that every summary carries it word for word. Put the result into a message.

    Raises:
        ValueError: when the text is empty or holds the marks themselves.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"pin({text!r}): expected a text that is not empty")
    if PIN_OPEN in text or PIN_CLOSE in text:
        raise ValueError(f"pin({text!r}): the text must not contain {PIN_OPEN} or {PIN_CLOSE}")
    return f"{PIN_OPEN}{text}{PIN_CLOSE}"


def pinned(text: str) -> list[str]:
    """The texts marked in ``text``, in order."""
    found: list[str] = []
    start = text.find(PIN_OPEN)
    while start >= 0:
        end = text.find(PIN_CLOSE, start)
        if end < 0:
            break
        value = text[start + len(PIN_OPEN) : end]
        if value.strip():
            found.append(value)
        start = text.find(PIN_OPEN, end)
    return found


def message_pins(messages: Iterable[Any], codec: Codec) -> list[str]:
    """The texts pinned in these messages; those of a summary are read back from its facts section."""
    found: list[str] = []
    for message in messages:
        summary = codec.summary_text(message)
        if summary is not None:
            found += parse(summary).pins
            continue
        marked = pinned(codec.text(message))
        if codec.role(message) == "tool":
            marked = [p for p in marked if len(p) <= MAX_TOOL_PIN]
        found += marked
    return _latest(found)


def extract(
    messages: Sequence[Any],
    codec: Codec,
    *,
    earlier: Facts | None = None,
    pins: Sequence[str] = (),
    live_tasks: Sequence[str] = (),
    max_tokens: int = MAX_TOKENS,
) -> Facts:
    """The durable facts of these messages, merged with those carried so far. Bounded; same input, same facts.

    What users, assistants and call arguments mention goes before what only a tool result mentions; decisions are
    those that users and assistants put in words. Facts of a summary among ``messages`` are carried. ``live_tasks``
    replace the earlier ones unless they are empty.
    """
    carried = [earlier or Facts()]
    strong, weak = _Found(), _Found()
    tools: list[str] = []
    for message in messages:
        summary = codec.summary_text(message)
        if summary is not None:
            carried.append(parse(summary))
            continue
        role = codec.role(message)
        if role == "system":
            continue
        if role == "tool":
            weak.scan(codec.text(message), limit=PER_RESULT)
        else:
            text = codec.text(message)
            strong.scan(text)
            strong.decide(text)
        for call in codec.calls(message):
            if call.name:
                tools.append(call.name)
            strong.scan(argument_text(call.arguments))

    def merged(kind: str, *, new: Sequence[str] = (), minor: Sequence[str] = ()) -> tuple[str, ...]:
        return tuple(_latest([*minor, *(v for c in carried for v in getattr(c, kind)), *new]))

    facts = Facts(
        tools=merged("tools", new=tools)[-MAX_TOOLS:],
        tasks=tuple(_latest(live_tasks)) or merged("tasks"),
        pins=tuple(_latest([*(p for c in carried for p in c.pins), *message_pins(messages, codec), *pins])),
        **{k: merged(k, new=strong.of(k), minor=weak.of(k))[-n:] for k, n in QUOTA.items()},
    )
    return _bounded(facts, max_tokens)


def render(facts: Facts) -> str:
    """The section as text, ``""`` when there are no facts."""
    lines = [
        f"{label}: " + _encode(value).replace("\n", "\n\t")
        for label, kind in _KINDS.items()
        for value in getattr(facts, kind)
    ]
    lines += [f"{PIN_OPEN}{_encode(text)}{PIN_CLOSE}" for text in facts.pins]
    return "\n".join([f"<{TAG}>", *lines, f"</{TAG}>"]) if lines else ""


def carried(summaries: Sequence[str]) -> Facts:
    """What one summary instead of these has to carry: the facts of all of them, without those that may be dropped."""
    parsed = [parse(text) for text in summaries]
    kinds = [kind for kind in Facts.__slots__ if kind not in MINOR]
    merged = {kind: tuple(_latest(v for facts in parsed for v in getattr(facts, kind))) for kind in kinds}
    return Facts(**{kind: values[-QUOTA[kind] :] if kind in QUOTA else values for kind, values in merged.items()})


def size(facts: Facts) -> int:
    """Tokens of what :func:`extract` bounds: everything but pins, live tasks and tool names."""
    return sum(_cost(value) for kind in QUOTA for value in getattr(facts, kind))


def parse(summary_text: str) -> Facts:
    """The facts that :func:`render` put at the end of a summary; no facts where there is no such section."""
    close = summary_text.rfind(f"\n</{TAG}>")
    start = summary_text.rfind(f"<{TAG}>\n", 0, close + 1) if close >= 0 else -1
    if start < 0:
        return Facts()
    body = summary_text[start + len(TAG) + 3 : close]
    found: dict[str, list[str]] = {kind: [] for kind in Facts.__slots__}
    position = 0
    while position < len(body):
        if body.startswith(PIN_OPEN, position):
            end = body.find(PIN_CLOSE, position)
            end = len(body) if end < 0 else end
            found["pins"].append(_decode(body[position + len(PIN_OPEN) : end]))
            position = end + len(PIN_CLOSE) + 1
            continue
        end = body.find("\n", position)
        while 0 <= end and body.startswith("\t", end + 1):
            end = body.find("\n", end + 1)
        end = len(body) if end < 0 else end
        label, colon, value = body[position:end].partition(": ")
        if colon and label in _KINDS:
            found[_KINDS[label]].append(_decode(value.replace("\n\t", "\n")))
        position = end + 1
    return Facts(**{kind: tuple(values) for kind, values in found.items()})


def strip(text: str) -> str:
    """A model's text without a facts section or pin marks of its own: those are ours to write."""
    start = text.find(f"<{TAG}>")
    while start >= 0:
        end = text.find(f"</{TAG}>", start)
        text = text[:start] + (text[end + len(TAG) + 3 :] if end >= 0 else "")
        start = text.find(f"<{TAG}>")
    text = text.replace(f"</{TAG}>", "").replace(PIN_OPEN, "").replace(PIN_CLOSE, "")
    return _OURS.sub(r"&lt;\1", text).strip()


def _encode(text: str) -> str:
    return _RAW.sub(lambda m: f"&{'' if m[1] is None else 'amp;' + m[1]}lt;{m[2]}", text)


def _decode(text: str) -> str:
    return _ESCAPED.sub(lambda m: f"&{m[1][4:]}lt;{m[2]}" if m[1] else f"<{m[2]}", text)


def _latest(values: Iterable[str]) -> list[str]:
    """Without repeats, each at its last place."""
    order: dict[str, None] = {}
    for value in values:
        if value:
            order.pop(value, None)
            order[value] = None
    return list(order)


def _bounded(facts: Facts, max_tokens: int) -> Facts:
    lists = {kind: list(getattr(facts, kind)) for kind in QUOTA}
    sizes = {kind: [_cost(v) for v in values] for kind, values in lists.items()}
    while sum(map(sum, sizes.values())) > max_tokens:
        # The least durable kinds first, then what takes most; of each kind its oldest.
        kind = next((k for k in MINOR if lists[k]), None) or max(QUOTA, key=lambda k: sum(sizes[k]))
        if not lists[kind]:
            break
        del lists[kind][0], sizes[kind][0]
    return replace(facts, **{kind: tuple(values) for kind, values in lists.items()})


def _cost(value: str) -> int:
    """Tokens of one fact in its section."""
    return count_text(value) + 2


# -- finding them --------------------------------------------------------------------------------------------
# Tokens are runs without blanks and brackets; each is classified alone and is short, so all of it is linear.

_TOKEN = re.compile(r"""[^\s"'`<>(){}\[\],;|=*]+""")
_URL = re.compile(
    r"(?:https?|wss?|ftp|ssh|git|s3|gs|file|postgres|postgresql|mysql|redis|mongodb)://[^\s\"'`<>]{3,300}"
)
_LINE_SUFFIX = re.compile(r"(?::\d{1,7}){1,2}$")
_PATH = re.compile(r"(?:[A-Za-z]:)?[\w.~@+%$#/\\:-]{1,300}")
_ROOTED = re.compile(r"(?:[A-Za-z]:[\\/]|\.{0,2}/|~/|\\\\)[\w.@+-]")
_FILE = re.compile(
    r"[\w.-]{1,100}\.(?:py|pyi|ts|tsx|js|jsx|mjs|json|jsonl|ya?ml|toml|ini|cfg|conf|env|lock|md|rst|txt|csv|tsv|parquet|"
    r"sql|db|sqlite|sh|bash|ps1|bat|go|rs|c|h|cc|cpp|hpp|cs|java|kt|rb|php|swift|scala|lua|r|ipynb|html?|css|scss|xml|"
    r"svg|png|jpe?g|gif|pdf|docx?|xlsx?|pptx?|zip|gz|tar|tgz|whl|log|proto|tf|gguf|pt|onnx|safetensors)",
    re.IGNORECASE,
)
_EXTENSION = re.compile(r"\.\w{1,10}$")
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_HEX = re.compile(r"(?:0x)?(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,128}", re.IGNORECASE)
_ISSUE = re.compile(r"(?:[\w.-]{1,60}/[\w.-]{1,60})?#\d{1,9}")
_CAPS = re.compile(r"(?=[A-Z_-]*\d)[A-Z][A-Z0-9_-]{2,60}")
_NAMED = re.compile(r"(?=[^\d]*\d)(?=[^_-]*[_-])[A-Za-z][\w.-]{4,80}")
_LONG = re.compile(r"\d{6,40}")
# A decision that was taken, not one that is open: in the languages that we can tell.
_DECIDED = re.compile(
    r"(?<!not )(?<!be )(?<!n't )\b(?:decided|decision(?=:)|agreed|chose|settled on|opted for|approved|rejected)\b"
    r"|결정했|결정하였|결정됐|결정됨|하기로 (?:했|하였|함|한)|決定し|に決め|ことにし|决定(?!吗|了吗)",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
_NUMBER = re.compile(r"[-+~≈$€£]?\d[\d.,:]{0,20}(?:%|[A-Za-zµ°]{1,6})?(?:/[A-Za-z]{1,6})?")


class _Found:
    """Facts found so far, by kind, oldest first."""

    def __init__(self) -> None:
        self._values: dict[str, list[str]] = {kind: [] for kind in QUOTA}

    def of(self, kind: str) -> list[str]:
        return self._values[kind]

    def decide(self, text: str) -> None:
        """Look for sentences that state a decision."""
        if _DECIDED.search(text) is None:
            return
        sentences = (s.strip() for line in _seen(text).splitlines() for s in _SENTENCE.split(line))
        self._values["decisions"] += [
            s for s in sentences if len(s) <= MAX_DECISION and not s.endswith(("?", "？")) and _DECIDED.search(s)
        ]

    def scan(self, text: str, *, limit: int = 64) -> None:
        """Look at the head and the tail of one text; at most ``limit`` facts of each kind, the last ones."""
        text = _seen(text)
        found: dict[str, list[str]] = {kind: [] for kind in QUOTA}
        for line in text.splitlines():
            _scan_line(line, found)
        for kind, values in found.items():
            self._values[kind] += _latest(values)[-limit:]


def _seen(text: str) -> str:
    """The part of one text that is looked at."""
    return text if len(text) <= SCAN_HEAD + SCAN_TAIL else text[:SCAN_HEAD] + "\n" + text[-SCAN_TAIL:]


def argument_text(arguments: str) -> str:
    """Call arguments as lines of text: JSON would hide paths behind its own escapes."""
    try:
        open_values: list[Any] = [json.loads(arguments[: SCAN_HEAD + SCAN_TAIL])]
    except (ValueError, RecursionError):
        return arguments.replace("\\n", "\n")
    lines: list[str] = []
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            open_values += [v if isinstance(v, dict | list | str) else f"{k} {v}" for k, v in reversed(value.items())]
        elif isinstance(value, list):
            open_values += reversed(value)
        elif value is not None:
            lines.append(str(value))
    return "\n".join(lines)


def _scan_line(line: str, found: dict[str, list[str]]) -> None:
    taken: list[tuple[int, int]] = []
    for match in _URL.finditer(line):
        url = match[0].rstrip(".,;:!?)]}*|")
        found["urls"].append(url)
        taken.append((match.start(), match.end()))
    tokens = list(_TOKEN.finditer(line))
    for k, match in enumerate(tokens):
        while taken and taken[0][1] <= match.start():
            taken.pop(0)
        if (taken and taken[0][0] < match.end()) or (match.start() and line[match.start() - 1] == "<"):
            continue
        token = match[0].rstrip(".:!?")
        if not token or len(token) > MAX_VALUE:
            continue
        kind = _kind(token)
        if kind == "numbers":
            first, last = tokens[max(0, k - 2)], tokens[min(len(tokens) - 1, k + 2)]
            context = line[first.start() : last.end()].strip()
            if len(context) <= 120 and len(context) > len(token):
                found["numbers"].append(context)
        elif kind == "paths":
            found["paths"].append(_LINE_SUFFIX.sub("", token))
        elif kind:
            found[kind].append(token)


def _kind(token: str) -> str | None:
    if _UUID.fullmatch(token) or _HEX.fullmatch(token) or _ISSUE.fullmatch(token) or _LONG.fullmatch(token):
        return "ids"
    if _is_path(token):
        return "paths"
    if _CAPS.fullmatch(token) or _NAMED.fullmatch(token):
        return "ids"
    return "numbers" if _NUMBER.fullmatch(token) else None


def _is_path(token: str) -> bool:
    bare = _LINE_SUFFIX.sub("", token)
    if not _PATH.fullmatch(bare) or not any(c.isalpha() for c in bare):
        return False
    slashes = bare.count("/") + bare.count("\\")
    if not slashes:
        return _FILE.fullmatch(bare) is not None
    if _ROOTED.match(bare):
        return True
    return slashes > 1 or _EXTENSION.search(bare) is not None

"""The questions: a small set of our own, and loaders for the files of HotpotQA and LoCoMo.

Each is a conversation that an agent has had, and something to ask or to do at its end that needs what is in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

KINDS = ("multi_hop", "dialogue", "action")
#: articles in the context of one of our multi-hop questions, the two that are needed among them
ARTICLES = 10

SYSTEM_READER = "You are an assistant that reads articles and answers questions about them."
SYSTEM_LISTENER = "You are an assistant that remembers conversations between people and answers questions about them."
SYSTEM_AGENT = "You are an agent that works on a code base and its services by calling tools."
ANSWER = "{question}\nAnswer with the answer alone, in as few words as possible."
ACT = (
    "{request}\nReply with the one tool call that you make next, as JSON and nothing else: "
    '{{"tool": "name", "arguments": {{...}}}}. Tools: {tools}.'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """``messages`` are what is compacted, ``ask`` is what comes then; an action has no ``answers``."""

    id: str
    kind: str
    messages: tuple[dict[str, Any], ...]
    ask: str
    answers: tuple[str, ...] = ()


def own_items() -> list[Item]:
    """Our own: 10 multi-hop questions, 10 about dialogues, 3 actions. Everything in them is invented."""
    data = json.loads(resources.files("smoothctx.bench").joinpath("qa_items.json").read_text(encoding="utf-8"))
    titles = list(data["articles"])
    items = []
    for k, q in enumerate(data["multi_hop"]):
        others = [t for t in titles[2 * k + 1 :] + titles[: 2 * k + 1] if t not in q["gold"]][: ARTICLES - 2]
        order = [*others[:2], q["gold"][k % 2], *others[2:7], q["gold"][1 - k % 2], *others[7:]]
        articles = [(t, data["articles"][t]) for t in order]
        items.append(_multi_hop(q["id"], articles, q["question"], q["answers"]))
    for talk in data["dialogues"]:
        sessions = [(s["date"], [(t[0], t[1]) for t in s["turns"]]) for s in talk["sessions"]]
        messages = _dialogue(talk["speakers"][0], sessions)
        items += [_talk(q["id"], messages, q["question"], q["answers"]) for q in talk["questions"]]
    articles = [(t, data["articles"][t]) for t in titles]
    return [*items, *(_action(a, data["tools"], articles[6 * k :][:8]) for k, a in enumerate(data["actions"]))]


def load_hotpotqa(path: Path, limit: int | None = None) -> list[Item]:
    """Questions of a HotpotQA file (JSON, as published, or as JSON lines of the data set's rows).

    Raises:
        ConfigurationError: when it cannot be read as one.
    """

    def read(row: Mapping[str, Any], k: int) -> list[Item]:
        context = row["context"]
        pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
        articles = [(str(title), " ".join(s.strip() for s in sentences)) for title, sentences in pairs]
        question, answer = _text(row, "question"), _text(row, "answer")
        return [_multi_hop(str(row.get("_id") or row["id"]), articles, question, [answer])]

    return _read("hotpotqa", path, read, limit)


def load_locomo(path: Path, limit: int | None = None) -> list[Item]:
    """Questions of a LoCoMo file (``locomo10.json``), ``limit`` of each conversation. Questions without an answer
    (the adversarial ones) are left out.

    Raises:
        ConfigurationError: when it cannot be read as one.
    """

    def read(sample: Mapping[str, Any], n: int) -> list[Item]:
        talk = sample["conversation"]
        numbers = sorted(int(k[8:]) for k in talk if k.startswith("session_") and k[8:].isdigit())
        sessions = [
            (str(talk.get(f"session_{k}_date_time", "")), [(str(t["speaker"]), _said(t)) for t in talk[f"session_{k}"]])
            for k in numbers
        ]
        messages = _dialogue(str(talk["speaker_a"]), sessions)
        asked = [q for q in sample["qa"] if q.get("answer") is not None and q.get("category") != 5][:limit]
        name = str(sample.get("sample_id", n))
        return [_talk(f"{name}-{k}", messages, _text(q, "question"), [str(q["answer"])]) for k, q in enumerate(asked)]

    return _read("locomo", path, read, None)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"its {name} is {value!r}")
    return value


def _said(turn: Mapping[str, Any]) -> str:
    caption = turn.get("blip_caption")
    return f"{turn.get('text', '')} [shows {caption}]" if caption else str(turn.get("text", ""))


def _read(
    option: str, path: Path, read: Callable[[Mapping[str, Any], int], list[Item]], limit: int | None
) -> list[Item]:
    items: list[Item] = []
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
        for k, row in enumerate(rows[:limit]):
            items += read(row, k)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--{option} {path}: not a file of that data set ({error!r})") from error
    return items


def _multi_hop(id: str, articles: Sequence[tuple[str, str]], question: str, answers: Sequence[str]) -> Item:
    messages = [{"role": "system", "content": SYSTEM_READER}, _user("Read these articles. Questions follow.")]
    messages += _reading(articles)
    return Item(
        id=id,
        kind="multi_hop",
        messages=tuple(messages),
        ask=ANSWER.format(question=question),
        answers=tuple(answers),
    )


def _reading(articles: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [m for k, (title, text) in enumerate(articles) for m in _called(f"read-{k}", "read", {"title": title}, text)]


def _dialogue(first: str, sessions: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> tuple[dict[str, Any], ...]:
    """One message for each turn, the first speaker's as the user's."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_LISTENER}]
    for date, turns in sessions:
        for k, (speaker, text) in enumerate(turns):
            when = f"[{date}] " if k == 0 and date else ""
            role = "user" if speaker == first else "assistant"
            messages.append({"role": role, "content": f"{when}{speaker}: {text}"})
    return tuple(messages)


def _talk(id: str, messages: tuple[dict[str, Any], ...], question: str, answers: Sequence[str]) -> Item:
    return Item(id=id, kind="dialogue", messages=messages, ask=ANSWER.format(question=question), answers=tuple(answers))


def _action(data: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], noise: Sequence[tuple[str, str]]) -> Item:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_AGENT}]
    for k, turn in enumerate(data["turns"]):
        if turn[0] in ("user", "assistant"):
            messages.append({"role": turn[0], "content": turn[1]})
        else:
            messages += _called(f"call-{k}", turn[0], turn[1], turn[2])
    messages += [_user("While you wait, read these for the report on the region."), *_reading(noise)]
    messages.append({"role": "assistant", "content": "I have read them."})
    named = "; ".join(f"{t['name']}({', '.join(t['arguments'])})" for t in tools)
    ask = ACT.format(request=data["request"], tools=named)
    return Item(id=data["id"], kind="action", messages=tuple(messages), ask=ask)


def _called(id: str, name: str, arguments: Mapping[str, Any], result: str) -> list[dict[str, Any]]:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": result},
    ]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}

"""``smoothctx bench qa``: scores, questions, loaders, runs on a fake engine; the embedded one is smoked only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from helpers import problems
from smoothctx import EngineOverloaded, EngineRefused, EngineUnreachable
from smoothctx.bench import qa
from smoothctx.bench.qa_data import Item, load_hotpotqa, load_locomo, own_items
from smoothctx.bench.qa_scores import Action, action_of, equivalence, exact_match, f1, held, normalise
from smoothctx.cli import build, main
from smoothctx.errors import ConfigurationError
from smoothctx.outputs import Output
from smoothctx.testing import run_virtual
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage

# -- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected", "em", "score"),
    [
        ("Brenn", ["Brenn"], 1, 1.0),
        ("  the BRENN. ", ["Brenn"], 1, 1.0),
        ("viola", ["piano", "the viola"], 1, 1.0),
        ("in Brenn", ["Brenn"], 0, 2 / 3),
        ("the town of Brenn in 1859", ["Brenn"], 0, 2 / 6),
        ("Marwen", ["Brenn"], 0, 0.0),
        ("", ["Brenn"], 0, 0.0),
        ("Brenn Brenn", ["Brenn"], 0, 2 / 3),
    ],
)
def test_exact_match_and_f1(answer: str, expected: list[str], em: float, score: float) -> None:
    """By words, without case, articles and punctuation; the best of several answers counts."""
    assert exact_match(answer, expected) == em and f1(answer, expected) == pytest.approx(score)


@given(st.text(max_size=60), st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_property_scores_lie_between_0_and_1(answer: str, expected: list[str]) -> None:
    """An exact match has an F1 of 1; normalising twice changes nothing."""
    em, score = exact_match(answer, expected), f1(answer, expected)
    assert 0 <= score <= 1 and (score == 1 or not em)
    assert normalise(normalise(answer)) == normalise(answer)


READ = Action("read", {"path": "a.py", "lines": 10})


@pytest.mark.parametrize(
    ("action", "tool", "keys", "values", "score"),
    [
        (READ, True, 1, 1, 1.0),
        (Action("read", {"path": " A.py", "lines": "10"}), True, 1, 1, 1.0),
        (Action("read", {"path": "b.py", "lines": 10}), True, 1, 0.5, 2.5 / 3),
        (Action("read", {"path": "a.py"}), True, 0.5, 0.5, 2 / 3),
        (Action("read", {"path": "a.py", "lines": 10, "x": 1, "y": 2}), True, 0.5, 0.5, 2 / 3),
        (Action("read", {}), True, 0, 0, 1 / 3),
        (Action("write", {"path": "a.py", "lines": 10}), False, 1, 1, 0.0),
        (Action(None), False, 0, 0, 0.0),
    ],
)
def test_equivalence_is_by_name_keys_and_values(
    action: Action, tool: bool, keys: float, values: float, score: float
) -> None:
    """The same call is 1, another tool is 0, and the rest lies between, the same in both directions."""
    for found in (equivalence(action, READ), equivalence(READ, action)):
        assert (found.tool, found.keys, found.values) == (tool, keys, values)
        assert found.score == pytest.approx(score) and found.same is (score == 1)


def test_nested_values_are_compared_by_structure() -> None:
    """Order of keys does not matter, order of a list does; True is not 1."""
    one = Action("t", {"x": {"a": [1, "B"], "b": None}})
    assert equivalence(one, Action("t", {"x": {"b": None, "a": [1, "b "]}})).same
    assert not equivalence(one, Action("t", {"x": {"a": ["B", 1], "b": None}})).same
    assert not equivalence(Action("t", {"x": True}), Action("t", {"x": 1})).same
    assert equivalence(Action("t"), Action("t")).same


def test_an_action_is_read_from_a_message_or_a_text() -> None:
    """A tool call, the same spelled out as JSON in some text, or none at all."""
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py", "lines": 10}'}}
    assert action_of({"role": "assistant", "content": None, "tool_calls": [call]}) == READ
    assert action_of({"role": "assistant", "content": "fine"}) == Action(None)
    for text in (
        '{"tool": "read", "arguments": {"path": "a.py", "lines": 10}}',
        'Sure {x}:\n```json\n{"name": "read", "parameters": {"path": "a.py", "lines": 10}}\n```',
        '{"tool": "read", "arguments": "{\\"path\\": \\"a.py\\", \\"lines\\": 10}"}',
    ):
        assert action_of(text) == READ
    for text in ("", "read it", '{"tool": 3}', '{"tool": ', "[1]"):
        assert action_of(text) == Action(None)
    assert action_of('{"tool": "read", "arguments": "not json"}') == Action("read", {"": "not json"})


# -- questions -----------------------------------------------------------------------------------------------------


def test_our_questions_can_be_answered_from_their_context() -> None:
    """10, 10 and 3; each context is a valid request that has the answer, and not the question."""
    items = own_items()
    assert [sum(i.kind == k for i in items) for k in ("multi_hop", "dialogue", "action")] == [10, 10, 3]
    assert len({i.id for i in items}) == len(items)
    for item in items:
        text = json.dumps(item.messages, ensure_ascii=False)
        assert not problems([*item.messages, {"role": "user", "content": item.ask}])
        assert item.ask.split("\n")[0] not in text
        if item.kind == "action":
            assert not item.answers
        else:
            assert any(a.lower().split(" 20")[0] in text.lower() for a in item.answers), item.id
        assert sum(map(qa.CODEC.estimate, item.messages)) > 500, "enough for several blocks"


def test_multi_hop_questions_need_two_articles_that_stand_apart() -> None:
    """Ten articles each; neither of the two alone names both ends."""
    for item in own_items():
        if item.kind == "multi_hop":
            results = [m["content"] for m in item.messages if m["role"] == "tool"]
            assert len(results) == 10 == len(set(results))


HOTPOT = {
    "_id": "5a8b",
    "question": "Where was it?",
    "answer": "Brenn",
    "type": "bridge",
    "supporting_facts": [["One", 0]],
    "context": [["One", ["It was in Brenn.", " It rained."]], ["Two", ["Nothing."]]],
}
LOCOMO = {
    "sample_id": "conv-26",
    "conversation": {
        "speaker_a": "Ada",
        "speaker_b": "Ben",
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_1": [
            {"speaker": "Ada", "dia_id": "D1:1", "text": "Hi Ben"},
            {"speaker": "Ben", "dia_id": "D1:2", "text": "Look", "blip_caption": "a photo of a dog"},
        ],
        "session_10": [{"speaker": "Ada", "dia_id": "D10:1", "text": "Last"}],
        "session_10_date_time": "9 June, 2023",
        "session_2": [{"speaker": "Ben", "dia_id": "D2:1", "text": "Second"}],
    },
    "qa": [
        {"question": "How many?", "answer": 3, "evidence": ["D1:1"], "category": 1},
        {"question": "Never?", "adversarial_answer": "x", "category": 5},
        {"question": "Who?", "answer": "Ben", "category": 2},
    ],
}


def test_the_files_of_hotpotqa_are_read(tmp_path: Path) -> None:
    """As published, and as rows of the data set."""
    rows = {
        "id": "5a8b",
        "question": "Where was it?",
        "answer": "Brenn",
        "context": {"title": ["One", "Two"], "sentences": [["It was in Brenn.", " It rained."], ["Nothing."]]},
    }
    published, lines = tmp_path / "a.json", tmp_path / "b.jsonl"
    published.write_text(json.dumps([HOTPOT, HOTPOT]))
    lines.write_text(json.dumps(rows) + "\n\n" + json.dumps(rows) + "\n")
    one, two = load_hotpotqa(published, 1), load_hotpotqa(lines)
    assert len(one) == 1 and len(two) == 2 and one[0] == two[0] and one[0].answers == ("Brenn",)
    assert [m["content"] for m in one[0].messages if m["role"] == "tool"] == ["It was in Brenn. It rained.", "Nothing."]


def test_the_files_of_locomo_are_read(tmp_path: Path) -> None:
    """Sessions in order of their numbers, with their dates and captions; questions without an answer are left out."""
    file = tmp_path / "locomo10.json"
    file.write_text(json.dumps([LOCOMO]))
    items = load_locomo(file)
    assert [(i.id, i.answers) for i in items] == [("conv-26-0", ("3",)), ("conv-26-1", ("Ben",))]
    assert [(m["role"], m["content"]) for m in items[0].messages[1:]] == [
        ("user", "[1:56 pm on 8 May, 2023] Ada: Hi Ben"),
        ("assistant", "Ben: Look [shows a photo of a dog]"),
        ("assistant", "Ben: Second"),
        ("user", "[9 June, 2023] Ada: Last"),
    ]
    assert len(load_locomo(file, 1)) == 1


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"question": 1}]', '[{"context": 3, "id": "x"}]', "[null]"])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    """With the option and the file in the message."""
    file = tmp_path / "x.json"
    file.write_text(text)
    for option, load in (("hotpotqa", load_hotpotqa), ("locomo", load_locomo)):
        if text == "":
            assert load(file) == []
            continue
        with pytest.raises(ConfigurationError, match=f"--{option} .*x.json"):
            load(file)
        with pytest.raises(ConfigurationError, match=f"--{option}"):
            load(tmp_path / "missing.json")


@pytest.mark.parametrize("name", ["question", "answer"])
def test_a_question_without_a_text_or_an_answer_is_an_error(tmp_path: Path, name: str) -> None:
    """Nothing is made of it."""
    file = tmp_path / "x.json"
    for value in (None, " "):
        file.write_text(json.dumps([{**HOTPOT, name: value}]))
        with pytest.raises(ConfigurationError, match=f"--hotpotqa .*its {name} is"):
            load_hotpotqa(file)
    file.write_text(json.dumps([{**LOCOMO, "qa": [{"question": None, "answer": 3}]}]))
    with pytest.raises(ConfigurationError, match="--locomo .*its question is None"):
        load_locomo(file)


# -- runs ----------------------------------------------------------------------------------------------------------


class Knower:
    """An engine that answers with what of the expected answers stands in its context, and summarises by its start."""

    identity = "http://test/v1#m"
    context_window = 100_000
    model = "m"

    def __init__(self, items: list[Item], fail_after: int | None = None) -> None:
        self.items = items
        self.fail_after = fail_after
        self.requests: list[list[dict[str, Any]]] = []

    async def complete(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any) -> Any:
        assert not problems(messages), problems(messages)
        self.requests.append(messages)
        if self.fail_after is not None and len(self.requests) > self.fail_after:
            raise KeyboardInterrupt
        usage = Usage(input_tokens=10, output_tokens=5, calls=1)
        last = str(messages[-1]["content"])
        item = next((i for i in self.items if i.ask in last), None)
        if item is None:
            return ModelReply(text="Somebody said something. Brenn.", usage=usage)
        context = json.dumps(messages[:-1], ensure_ascii=False)
        if item.kind == "action":
            known = "TCK-5581" in context
            call = {"tool": "close_ticket", "arguments": {"id": "TCK-5581" if known else "?", "resolution": "fixed"}}
            return ModelReply(text=json.dumps(call), usage=usage)
        return ModelReply(text=next((a for a in item.answers if a in context), "I do not know"), usage=usage)


def settings(*blocks: int) -> list[qa.Setting]:
    """Raw, one summary, and blocks."""
    made = [qa.Setting(name="raw"), qa.Setting(name="summarize", max_tokens=64)]
    return [*made, *(qa.Setting(name=f"blocks {b}", detail="concise", block_tokens=b) for b in blocks)]


async def test_the_raw_context_scores_higher_than_one_that_lost_the_answer() -> None:
    """Every cell is asked with a valid request; tokens, scores and the table follow."""
    items = own_items()
    engine, cells = Knower(items), []
    await qa.measure(engine, "x", items, settings(250), cells)
    assert len(cells) == 23 * 3 and not any(c.error for c in cells)
    found = {(r["kind"], r["setting"]): r for r in qa.rows(cells)}
    assert found["multi_hop", "raw"]["exact_match"] == 1.0 and found["multi_hop", "raw"]["kept"] == 1.0
    assert found["multi_hop", "summarize"]["exact_match"] == pytest.approx(0.1), "Brenn alone is in every summary"
    assert found["multi_hop", "raw"]["held"] == 1.0 and found["multi_hop", "summarize"]["held"] == pytest.approx(0.1)
    assert found["multi_hop", "summarize"]["held"] < found["multi_hop", "blocks 250"]["held"] <= 1.0, "facts"
    assert found["action", "raw"]["held"] is None and not qa.weakness(cells)
    assert found["multi_hop", "summarize"]["kept"] < found["multi_hop", "blocks 250"]["kept"] < 1
    assert found["action", "raw"]["equivalence"] == 1.0 and found["action", "raw"]["f1"] is None
    assert 0 < found["action", "summarize"]["equivalence"] <= 1
    assert all(c.context_tokens < c.raw_tokens for c in cells if c.setting != "raw")
    text = qa.table(cells)
    assert len(text.splitlines()) == 2 + 3 * 3 and "multi_hop  raw" in text
    assert json.loads(json.dumps(qa.as_json(cells)))["rows"][0]["cells"] == 10


async def test_without_a_call_in_the_raw_context_there_is_nothing_to_compare() -> None:
    """Two models that both say nothing are not equivalent."""
    item = own_items()[-1]

    class Mute(Knower):
        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            return ModelReply(text="Hm. " * 5, usage=Usage(calls=1))

    cells: list[qa.Cell] = []
    await qa.measure(Mute([item]), "x", [item], settings(), cells)
    assert [c.equivalence for c in cells] == [None, None]
    assert qa.weakness(cells) == "It calls a tool in 0 of 1 actions with the raw context."
    assert "-" in qa.table(cells)


async def test_a_weak_model_is_said_to_be_one() -> None:
    """It answers nothing from the raw context either: what the summaries kept shows without it."""
    items = own_items()[:4]

    class Weak(Knower):
        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            known = any(i.ask in str(messages[-1]["content"]) for i in items)
            return ModelReply(text="I think so." if known else "The town is Brenn.", usage=Usage(calls=1))

    cells: list[qa.Cell] = []
    await qa.measure(Weak(items), "x", items, settings(), cells)
    assert "answers 0 of 4 questions from the raw context" in qa.weakness(cells)
    found = {r["setting"]: r for r in qa.rows(cells)}
    assert found["raw"]["exact_match"] == 0.0 and found["raw"]["held"] == 1.0
    assert found["summarize"]["held"] == 0.25, "only what its text says"


@pytest.mark.parametrize(
    ("context", "expected", "score"),
    [
        ("It was in Brenn.", ["brenn"], 1.0),
        ("It was in Brenner.", ["Brenn"], 0.0),
        ("on the 2 May, they", ["the second of May", "2 May"], 1.0),
        ("nothing", ["", "the"], 0.0),
        ("", [], 0.0),
    ],
)
def test_an_answer_is_held_as_whole_words(context: str, expected: list[str], score: float) -> None:
    """Normalised on both sides, without a model."""
    assert held(context, expected) == score


async def test_an_engine_that_fails_makes_errors_of_cells() -> None:
    """The others go on; the table counts them, and they are asked again when the run is resumed."""
    item = own_items()[0]

    class Down(Knower):
        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            if not self.requests:
                return await super().complete(messages, max_tokens=max_tokens)
            raise EngineUnreachable("no server")

    cells: list[qa.Cell] = []
    await qa.measure(Down([item]), "x", [item], settings(), cells)
    assert [bool(c.error) for c in cells] == [False, True] and "EngineUnreachable: no server" in cells[1].error
    assert qa.rows(cells)[1]["errors"] == 1 and qa.rows(cells)[1]["f1"] is None


async def test_blocks_that_stayed_raw_are_shown() -> None:
    """Of a block whose summary is no smaller the raw text counts as kept: its share stands beside it."""
    item = next(i for i in own_items() if i.kind == "dialogue")

    class Chatty(Knower):
        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            if item.ask in str(messages[-1]["content"]) or len(self.requests) % 2:
                return await super().complete(messages, max_tokens=max_tokens)
            self.requests.append(messages)
            return ModelReply(text="so " * 400, usage=Usage(calls=1))

    cells: list[qa.Cell] = []
    await qa.measure(Chatty([item]), "x", [item], [settings()[0], *settings(250)[2:]], cells)
    raw, blocks = cells
    assert raw.left_raw == 1.0 and 0 < blocks.left_raw < 1 and not blocks.error
    assert [line.split()[-5] for line in qa.table(cells).splitlines()[2:]] == ["100%", f"{blocks.left_raw:.0%}"]


async def test_a_block_that_the_engine_refused_is_an_error_and_asked_again() -> None:
    """What the others kept is no score of this setting."""
    item = next(i for i in own_items() if i.kind == "dialogue")

    class Refusing(Knower):
        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            if len(self.requests) == 1:
                self.requests.append(messages)
                raise EngineRefused("bad block", status=400)
            return await super().complete(messages, max_tokens=max_tokens)

    cells: list[qa.Cell] = []
    await qa.measure(Refusing([item]), "x", [item], [settings()[0], *settings(250)[2:]], cells)
    assert not cells[0].error and cells[1].error.endswith("of the context stayed raw: EngineRefused: bad block")
    assert qa.rows(cells)[1]["errors"] == 1 and qa.rows(cells)[1]["held"] is None
    engine, again = Knower([item]), []
    await qa.measure(engine, "x", [item], [settings()[0], *settings(250)[2:]], again, None, {c.key: c for c in cells})
    assert again[0] == cells[0] and not again[1].error and (again[1].left_raw or 0) < 0.1, "the short last block"


async def test_a_server_that_takes_no_temperature_is_asked_without() -> None:
    """A hosted reasoning model refuses it by name: every cell is measured all the same."""

    class Hosted(Knower):
        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            if "temperature" in options:
                raise EngineRefused("HTTP 400: Unsupported value: 'temperature' does not support 0", status=400)
            return await super().complete(messages, max_tokens=max_tokens, **options)

    items = own_items()[:2]
    cells: list[qa.Cell] = []
    await qa.measure(Hosted(items), "x", items, settings(250), cells)
    assert len(cells) == 6 and not any(c.error for c in cells)


def test_a_server_that_limits_requests_is_asked_again_when_it_wishes(capsys: pytest.CaptureFixture[str]) -> None:
    """The question and the summaries alike: no cell fails for it, and none is scored without a block."""
    item = own_items()[0]

    class Limited(Knower):
        open_at = 0.0

        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            now = asyncio.get_running_loop().time()
            if now < self.open_at:
                raise EngineOverloaded("too many", status=429, retry_after_s=self.open_at - now)
            self.open_at = now + 20.0
            return await super().complete(messages, max_tokens=max_tokens, **options)

    async def measured() -> tuple[list[qa.Cell], int]:
        cells: list[qa.Cell] = []
        engine = Limited([item])
        await qa.measure(engine, "x", [item], settings(250), cells)
        return cells, len(engine.requests)

    cells, requests = run_virtual(measured)
    assert len(cells) == 3 and not any(c.error for c in cells) and requests >= 5
    assert (cells[2].left_raw or 0) < 0.1, "the short last block alone"
    assert "limits requests (429): again in 20 s" in capsys.readouterr().err


async def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """Finished cells are in the file at once and are not asked again; another model or setting asks anew, and what
    others have asked stays in the file."""
    items, file = own_items()[:3], tmp_path / "qa.json"

    def there() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
        return found

    cells: list[qa.Cell] = []
    with pytest.raises(KeyboardInterrupt):
        await qa.measure(Knower(items, fail_after=4), "x", items, settings(), cells, Output("--json", file))
    assert len(there()) == len(cells) == 3
    engine, again = Knower(items), []
    await qa.measure(engine, "x", items, settings(), again, Output("--json", file), qa._read(file))
    assert len(again) == 6 and again[:3] == cells and len(engine.requests) == 5, "a summary is two requests"
    assert len(there()) == 6
    engine, last = Knower(items), []
    await qa.measure(engine, "x", items, settings(), last, Output("--json", file), qa._read(file))
    assert last == again and not engine.requests
    other: list[qa.Cell] = []
    await qa.measure(engine, "y", items[:1], settings(), other, Output("--json", file), qa._read(file))
    assert engine.requests and len(there()) == 8 and qa.rows(other) == json.loads(file.read_text())["rows"]


async def test_a_raw_action_that_failed_is_asked_again_and_the_others_are_compared_then() -> None:
    """They have nothing to be compared with before; what they answered is not asked again."""
    item = next(i for i in own_items() if i.kind == "action")

    class Down(Knower):
        async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
            if not self.requests:
                self.requests.append(messages)
                raise EngineUnreachable("no server")
            return await super().complete(messages, max_tokens=max_tokens)

    first: list[qa.Cell] = []
    await qa.measure(Down([item]), "x", [item], settings(300), first)
    assert [bool(c.error) for c in first] == [True, False, False] and [c.equivalence for c in first] == [None] * 3
    engine, second, whole = Knower([item]), [], []
    await qa.measure(engine, "x", [item], settings(300), second, None, {c.key: c for c in first})
    assert len(engine.requests) == 1
    await qa.measure(Knower([item]), "x", [item], settings(300), whole)
    assert second == whole and all(c.equivalence is not None for c in second)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"benchmark": "qa"}', '{"cells": []}', '{"a": 1}\n{"a": 2}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked, and it stays as it is."""
    file = tmp_path / "x.json"
    file.write_text(text)
    assert main(["bench", "qa", "--url", "http://127.0.0.1:9", "--name", "m", "--json", str(file)]) == 1
    assert "not a file of this benchmark" in capsys.readouterr().err and file.read_text() == text
    file.write_text('{"benchmark": "qa", "cells": [{"key": "k", "what": 3}]}')
    with pytest.raises(ConfigurationError, match="not a file of this benchmark"):
        qa._read(file)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "trivia"], "--kinds trivia"),
        (["--items", "0"], "--items 0"),
        (["--blocks", "ten"], "--blocks ten"),
        (["--blocks", "10"], "--blocks 10"),
        (["--blocks", "\u00b2"], "--blocks \u00b2: expected whole numbers"),
        (["--blocks", "9" * 5000], "expected whole numbers"),
        (["--blocks", "", "--details", "nonsense"], "--details nonsense"),
        (["--window", "0"], "--window 0: expected at least 512"),
        (["--window", "-5"], "--window -5"),
        (["--details", "huge"], "--details huge"),
        (["--summary-tokens", "1"], "--summary-tokens 1"),
        (["--block-summary-tokens", "1"], "--block-summary-tokens 1"),
        (["--url", "http://127.0.0.1:9"], "--url: needs --name"),
        (["--url", "http://127.0.0.1:9", "--model", "m", "--api-key-env", "SMOOTHCTX_NO_SUCH"], "is not set"),
        (["--json", "/no/such/folder/x.json"], "does not exist"),
        (["--json", "/"], "--json /: that is a folder"),
        (["--locomo", "/no/such/file"], "--locomo /no/such/file"),
        (["--hotpotqa", "/no/such/file"], "--hotpotqa /no/such/file"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the option in the message."""
    assert main(["bench", "qa", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress on stderr, the table on stdout; an interrupted run shows what it has, and ends with 130."""
    items = own_items()

    class Served(Knower):
        limit: int | None = None

        def __init__(self, url: str, model: str, **options: Any) -> None:
            super().__init__(items, self.limit)

        async def __aenter__(self) -> Served:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(qa, "OpenAIEngine", Served)
    file = tmp_path / "out.json"
    arguments = ["bench", "qa", "--url", "http://test", "--model", "m", "--items", "2", "--blocks", "300"]
    assert main([*arguments, "--details", "concise", "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert "multi_hop" in printed.out and "blocks 300 concise" in printed.out and "[1/18] hop-01 raw" in printed.err
    assert len(json.loads(file.read_text())["cells"]) == 6 * 3
    Served.limit = 0
    assert main([*arguments, "--details", "concise", "--json", str(file)]) == 0, "nothing is left to ask"
    Served.limit, file = 2, tmp_path / "other.json"
    assert main([*arguments, "--json", str(file)]) == 130
    assert "raw" in capsys.readouterr().out and 0 < len(json.loads(file.read_text())["cells"]) < 6


def test_the_model_on_a_server_is_named_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--name``, or ``--model`` as before; the key from the command line or from the environment, never shown."""
    made: list[tuple[Any, ...]] = []

    def server(url: str, name: str, *, api_key: str | None, **_: Any) -> Any:
        made.append((url, name, api_key))
        raise ConfigurationError("enough")

    monkeypatch.setattr(qa, "OpenAIEngine", server)
    monkeypatch.setenv("OWN_KEY", "sk-1")
    for own in (["--name", "m"], ["--model", "m", "--api-key", "sk-2"], ["--name", "m", "--api-key-env", "OWN_KEY"]):
        assert main(["bench", "qa", "--url", "http://x/v1", *own]) == 1
    assert made == [("http://x/v1", "m", key) for key in (None, "sk-2", "sk-1")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "qa", "--url", "http://x/v1", "--name", "m", "--api-key-env", "sk-SECRET"],
        ["bench", "qa", "--api-ke", "sk-SECRET"],
        ["bench", "ttft", "--api=sk-SECRET", "--api-key2", "sk-SECRET"],
        ["doctor", "http://x/v1", "--api-key", "sk-SECRET"],
        ["bench", "volume", "--api_key", "sk-SECRET"],
    ],
)
def test_no_key_is_shown_and_no_option_is_guessed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is cut short or misspelt is wrong, whatever the command; what follows it may be a key."""
    try:
        code: Any = main(arguments)
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert code in (1, 2) and "SECRET" not in printed.out + printed.err


@pytest.mark.parametrize("arguments", [["qa", "--item", "1"], ["ttft", "--turn", "3"], ["volume", "--run", "1"]])
def test_options_are_whole(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No abbreviations: a later option of that name would change what it means."""
    with pytest.raises(SystemExit) as end:
        build().parse_args(["bench", *arguments])
    assert end.value.code == 2 and "unrecognized arguments" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """No question could be asked."""
    code = main(["bench", "qa", "--url", "http://127.0.0.1:9", "--model", "m", "--items", "1", "--kinds", "multi_hop"])
    assert code == 1 and "EngineUnreachable" in capsys.readouterr().err


def test_it_is_part_of_the_command_line() -> None:
    """With defaults that ask everything."""
    quick = build().parse_args(["bench", "qa", "--quick"])
    assert [(s.name, s.max_tokens) for s in qa.chosen_settings(quick)] == [
        ("raw", 0),
        ("summarize", 96),
        ("blocks 400 concise", 64),
    ]
    assert len(qa.chosen_items(quick)) == 6
    own = build().parse_args(["bench", "qa", "--quick", "--blocks", "300", "--items", "1"])
    assert qa.chosen_settings(own)[-1].name == "blocks 300 concise" and len(qa.chosen_items(own)) == 3
    options = build().parse_args(["bench", "qa"])
    assert len(qa.chosen_items(options)) == 23
    assert [s.name for s in qa.chosen_settings(options)][:3] == ["raw", "summarize", "blocks 250 concise"]


@pytest.mark.engine
def test_on_the_embedded_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smoke run: one question, raw and summarised; what it answers is the small model's business."""
    file = tmp_path / "out.json"
    arguments = ["--items", "1", "--kinds", "dialogue", "--blocks", "", "--summary-tokens", "48", "--window", "2048"]
    assert main(["bench", "qa", *arguments, "--json", str(file)]) == 0
    raw, summary = json.loads(file.read_text())["cells"]
    assert raw["setting"] == "raw" and raw["answer"] and not raw["error"]
    assert summary["setting"] == "summarize" and 0 < summary["context_tokens"] < raw["context_tokens"] / 2

"""``smoothctx bench ttft``: whole small plans in virtual time, going on after an interruption, and wrong arguments."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smoothctx.bench import ttft, ttft_report
from smoothctx.bench.ttft_figures import pairs
from smoothctx.bench.ttft_file import read, write
from smoothctx.bench.ttft_plan import DEFAULT_PLAN, Cell, Settings, cells, read_plan, texts
from smoothctx.bench.ttft_run import measure
from smoothctx.cli import main
from smoothctx.demo.chunks import Chunk
from smoothctx.errors import ConfigurationError, EngineRefused, EngineUnreachable, SmoothctxError
from smoothctx.outputs import Output
from smoothctx.transforms import Isolate
from ttft_fakes import FAST_RUN, SMALL, Fake, at_once, measured


class Stop(Exception):
    """Ends a run in the middle."""


def turns(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The turns of a cell's first session."""
    found: list[dict[str, Any]] = data["cells"][key]["sessions"][0]["turns"]
    return found


# -- the plan --------------------------------------------------------------------------------------------------------


def test_the_modes_take_turns_and_every_batch_is_a_whole() -> None:
    """The second batch of anything comes after the first of everything; the mode that goes first alternates."""
    found = cells({"summarise": {1: 2, 2: 3}, "offload": {1: 1}})
    assert [c.key for c in found] == [
        "summarise/inline/1/0",
        "summarise/lookahead/1/0",
        "summarise/inline/2/0",
        "summarise/lookahead/2/0",
        "offload/inline/1/0",
        "offload/lookahead/1/0",
        "summarise/lookahead/1/1",
        "summarise/inline/1/1",
        "summarise/lookahead/2/1",
        "summarise/inline/2/1",
    ]
    assert {c.mode for c in cells({"saturated": {4: 4}})} == {"off", "lookahead"}


def test_plans_are_read_and_checked() -> None:
    """Strategy, concurrency, sessions; anything else is named."""
    assert read_plan("summarise:1:5, summarise:2:4,saturated:4:8") == {
        "summarise": {1: 5, 2: 4},
        "saturated": {4: 8},
    }
    for wrong in ("summarise", "summarise:1", "other:1:1", "summarise:0:1", "summarise:1:0", "summarise:a:b", ""):
        with pytest.raises(ConfigurationError, match="--plan"):
            read_plan(wrong)


def test_texts_come_turn_by_turn() -> None:
    """Long turns have several parts, sessions begin at other places, and nothing is left out."""
    pool = [Chunk(f"f{k}", 1, f"text {k}\n", 10) for k in range(50)]
    reading = texts(pool, Settings(), 0)
    first = [next(reading) for _ in range(10)]
    assert [c.tokens for c in first] == [10] * 8 + [20, 10]
    assert "".join(c.text for c in first) == "".join(c.text for c in pool[:11])
    assert next(texts(pool, Settings(), 1)).text != first[0].text


# -- cells -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> tuple[dict[str, Any], Fake]:
    """Every strategy once in each mode, two sessions at once for one of them, and the saturated part."""
    return measured("summarise:1:1,summarise:2:2,keep-recent:1:1,offload:1:1,isolate:1:1,saturated:3:3")


def test_every_cell_has_every_turn(small: tuple[dict[str, Any], Fake]) -> None:
    """In order, with the figures that the server reported."""
    data, engine = small
    assert len(data["cells"]) == 12 and not any(c["errors"] for c in data["cells"].values())
    for key, cell in data["cells"].items():
        assert key == Cell(cell["strategy"], cell["mode"], cell["concurrency"], cell["batch"]).key
        assert len(cell["sessions"]) == cell["concurrency"]
        for session in cell["sessions"]:
            numbers = [t["number"] for t in session["turns"] if t["kind"] != "handover"]
            assert numbers == list(range(1, len(numbers) + 1)) and (
                cell["strategy"] == "saturated" or len(numbers) == 10
            )
            assert all(t["ttft_ms"] <= t["total_ms"] and t["output_tokens"] == 8 for t in session["turns"])
            assert all(len(t["gaps_ms"]) == 7 and t["prompt_tokens"] > 0 for t in session["turns"])
    assert all(c.outcome in ("done", "cancelled") for c in engine.calls), "and every request was valid"


@pytest.mark.parametrize("strategy", ["summarise", "keep-recent", "offload"])
def test_in_line_waits_and_lookahead_does_not(small: tuple[dict[str, Any], Fake], strategy: str) -> None:
    """Both rewrite; in line the new view is cold, with lookahead most of it is cached."""
    data, _ = small
    inline = [t for t in turns(data, f"{strategy}/inline/1/0") if t["transform"]]
    ahead = [t for t in turns(data, f"{strategy}/lookahead/1/0") if t["transform"]]
    assert inline and ahead
    # Stubs stay for good: in so small a window offloading leaves no room in the end, and the fallback comes.
    ready = ahead[:1] if strategy == "offload" else ahead
    assert all(t["how"] == "ready" and t["waited_ms"] == 0 for t in ready)
    cached = [sum(t["cached_tokens"] / t["prompt_tokens"] for t in arm) / len(arm) for arm in (inline, ahead)]
    assert cached[0] < cached[1]
    if strategy == "summarise":
        assert all(t["how"] == "promoted" and t["waited_ms"] > 500 for t in inline), "24 tokens at 40 a second"


def test_every_turn_stands_in_one_line_of_the_report(small: tuple[dict[str, Any], Fake]) -> None:
    """Rewrites, ordinary turns, and the rewrites of a sub-agent's parent are all there are."""
    data, _ = small
    lines = ("rewrites", "ordinary", "parent_rewrites")
    for arm in ttft_report.figures(data)["arms"]:
        assert sum(arm[line]["n"] for line in lines if arm[line] is not None) == arm["all"]["n"]
        assert (arm["parent_rewrites"] is None) is (arm["strategy"] != "isolate")
        assert arm["strategy"] != "isolate" or arm["parent_rewrites"]["n"] > 0


def test_the_same_messages_are_handed_over_in_both_modes(small: tuple[dict[str, Any], Fake]) -> None:
    """Cold in line, warm with lookahead; the texts differ in nothing but the session's name, which is not in them."""
    data, engine = small
    inline, ahead = (
        [t for t in turns(data, f"isolate/{mode}/1/0") if t["kind"] == "handover"] for mode in ("inline", "lookahead")
    )
    assert [t["number"] for t in inline] == [t["number"] for t in ahead] == [4, 8]
    assert [t["how"] for t in inline] == ["inline"] * 2 and [t["how"] for t in ahead] == ["ready"] * 2
    assert all(a["ttft_ms"] > 2 * b["ttft_ms"] for a, b in zip(inline, ahead, strict=True))
    openings = [
        [m["content"] for m in c.messages if m["role"] == "user"]
        for c in engine.calls
        if "You check" in c.messages[0]["content"] and c.max_tokens == 8
    ]
    assert len(openings) == 4 and openings[:2] == openings[2:]


def test_promise_15_a_hand_over_that_waits_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """An opening that is not there yet is waited for: that is no hit, however soon it comes."""
    apply = Isolate.apply

    async def slow(self: Isolate, request: Any) -> Any:
        await asyncio.sleep(6.0)  # longer than the tool between two turns
        return await apply(self, request)

    monkeypatch.setattr(Isolate, "apply", slow)
    data, _ = measured("isolate:1:1")
    handed = [t for t in turns(data, "isolate/lookahead/1/0") if t["kind"] == "handover"]
    assert handed and all(t["how"] == "late" and t["waited_ms"] > 500 for t in handed)
    [(_, ahead)] = pairs(data).values()
    figures = ttft_report.figures(data)["arms"]
    assert [(a["hit_rate"], a["late_rate"]) for a in figures if a["mode"] == "lookahead"] == [(0.0, 1.0)]
    assert ahead.rewrites == handed


def test_nothing_is_shared_between_sessions(small: tuple[dict[str, Any], Fake]) -> None:
    """The first turn of each finds less than a block of its prompt cached, though the texts come again."""
    data, _ = small
    names = [s["name"] for cell in data["cells"].values() for s in cell["sessions"]]
    assert len(set(names)) == len(names)
    firsts = [s["turns"][0] for cell in data["cells"].values() for s in cell["sessions"]]
    assert all(t["cached_tokens"] < 32 for t in firsts)


def test_no_text_is_used_before_its_turn() -> None:
    """Whatever a background call holds was in a turn's own call before."""
    _, engine = measured("summarise:1:1,keep-recent:1:1,isolate:1:1")
    started = next(
        k for k, c in enumerate(engine.calls) if "/summarise/" in str(c.messages[0]["content"]).replace(" ", "/")
    )
    seen: set[tuple[str, str]] = set()
    for call in engine.calls[started:]:
        name = re.findall(r"^[0-9a-f]{8} [^\n]*?/\d/\d/\d", str(call.messages[0]["content"]))[0]
        parts = {(name, m["content"]) for m in call.messages if str(m["content"]).startswith("Part of")}
        if call.max_tokens == SMALL.reply_tokens:
            seen |= parts
        elif call.max_tokens == 1:  # a preload may end in the middle of a text
            assert all(any(n == name and known.startswith(p) for n, known in seen) for _, p in parts)
        else:
            assert parts <= seen


def test_background_work_beside_a_turn_is_seen(small: tuple[dict[str, Any], Fake]) -> None:
    """Where it was saved: beside is what the intervals say, and in line there is none but the rewrite itself."""
    data, _ = small
    cell = data["cells"]["summarise/lookahead/1/0"]
    kinds = {c["kind"] for c in cell["background"]}
    assert kinds == {"summary", "preload"} and all(c["start_s"] <= c["end_s"] for c in cell["background"])
    for key in ("summarise/inline/1/0", "keep-recent/inline/1/0"):
        assert [t["beside"] for t in turns(data, key)] == [
            t["transform"] and key.startswith("summarise") for t in turns(data, key)
        ]


def test_summaries_are_seen_on_a_server_with_priorities() -> None:
    """There a summary may be sent by another way, so that it can be promoted."""
    data, _ = measured("summarise:1:1", engine=lambda: Fake(priority=True))
    assert any(c["kind"] == "summary" for c in data["cells"]["summarise/lookahead/1/0"]["background"])


def test_saturated_sessions_stay_below_the_limit(small: tuple[dict[str, Any], Fake]) -> None:
    """A closed loop of ordinary turns: none rewrites, with smoothctx or without, and lookaheads were wanted."""
    data, _ = small
    for mode in ("off", "lookahead"):
        cell = data["cells"][f"saturated/{mode}/3/0"]
        found = [t for s in cell["sessions"] for t in s["turns"]]
        assert not any(t["transform"] for t in found if mode == "off")
        assert {t["kind"] for t in found} == {"turn", "opening"}
        assert all(t["prompt_tokens"] < 0.85 * SMALL.window for t in found)
    assert (
        data["cells"]["saturated/lookahead/3/0"]["lookaheads"] and not data["cells"]["saturated/off/3/0"]["lookaheads"]
    )


# -- going on ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """Whole cells are kept, the one that was under way is dropped, and nothing is calibrated again."""
    file, lines = tmp_path / "ttft.json", list[str]()

    def stop(line: str) -> None:
        lines.append(line)
        if sum("keep-recent" in said for said in lines) == 3:
            raise Stop

    with pytest.raises(Stop):
        measured("summarise:1:1,keep-recent:1:1", file=file, say=stop, verbose=True)
    left = read(file)
    assert list(left["cells"]) == ["summarise/inline/1/0", "summarise/lookahead/1/0"]
    lines.clear()
    data, engine = measured("summarise:1:1,keep-recent:1:1", file=file, say=lines.append)
    assert len(data["cells"]) == 4 and data["calibration"] == left["calibration"] and "calibrating ..." not in lines
    assert any("2 are there already" in line for line in lines)
    assert not any(
        str(c.messages[0]["content"]).split("\n")[0].endswith("summarise/inline/1/0/0") for c in engine.calls
    )
    assert read(file) == json.loads(json.dumps(data))
    before = file.read_bytes()
    _, engine = measured("summarise:1:1,keep-recent:1:1", file=file)
    assert not engine.calls and file.read_bytes() == before
    more, _ = measured("keep-recent:1:2", file=file)
    assert len(more["cells"]) == 6, "another plan adds to it"


def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    """Named are the settings that differ; other files are refused as well."""
    file = tmp_path / "ttft.json"
    measured("keep-recent:1:1", file=file)
    other = replace(SMALL, reply_tokens=9)
    with pytest.raises(ConfigurationError, match="reply_tokens: 8 there, 9 now"):
        measured("keep-recent:1:1", file=file, settings=other)
    with pytest.raises(ConfigurationError, match="engine: 'fake://engine#fake' there"):
        measured("keep-recent:1:1", file=file, engine=lambda: Fake(identity="fake://other#fake"))
    for content in ("{}", "no json", '{"format": "smoothctx ttft 1"}'):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigurationError, match="this benchmark"):
            measured("keep-recent:1:1", file=file)


def test_other_texts_are_refused(tmp_path: Path) -> None:
    """A folder of the same name with other texts in it; a file of an older version does not say, and goes on."""
    file, folder, lines = tmp_path / "ttft.json", tmp_path / "texts", list[str]()
    folder.mkdir()
    text = "\n".join(f"line {k} of the text that they read" for k in range(8000))
    (folder / "a.md").write_text(text, encoding="utf-8")
    short = replace(SMALL, turns=3)
    measured("keep-recent:1:1", file=file, settings=short, folder=folder)
    (folder / "a.md").write_text(text.replace("line 7 ", "word 7 "), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="other texts"):
        measured("keep-recent:1:2", file=file, settings=short, folder=folder)
    old = read(file)
    del old["texts_digest"]
    write(Output("--json", file), old)
    data, _ = measured("keep-recent:1:2", file=file, settings=short, folder=folder, say=lines.append)
    assert len(data["cells"]) == 4 and any("does not tell which texts" in line for line in lines)


def test_an_engine_that_fails_once_costs_one_cell_only(tmp_path: Path) -> None:
    """The cell is measured again from its beginning; an engine that fails again ends the run, and the file stays."""
    lines: list[str] = []

    def broken(times: int) -> Callable[[], Fake]:
        class Broken(Fake):
            left = times

            def _check(self, call: Any) -> Any:
                if len(call.messages) > 6 and self.left and "inline" in str(call.messages[0]["content"]):
                    self.left -= 1
                    raise EngineUnreachable("gone")
                return super()._check(call)

        return Broken

    data, _ = measured("keep-recent:1:1", engine=broken(1), say=lines.append)
    assert len(data["cells"]) == 2 and any("gone; once more" in line for line in lines)
    with pytest.raises(EngineUnreachable, match="gone"):
        measured("keep-recent:1:1", engine=broken(2), file=tmp_path / "f.json")


def test_options_that_a_server_refuses_are_left_out() -> None:
    """Found out once, before the first cell; what was refused stands in the file."""

    class Picky(Fake):
        def _check(self, call: Any) -> Any:
            if "ignore_eos" in call.options or any(m["role"] == "tool" for m in call.messages):
                raise EngineRefused("HTTP 400", status=400)
            return super()._check(call)

    lines: list[str] = []
    data, engine = measured("keep-recent:1:1,offload:1:1", engine=Picky, say=lines.append)
    assert data["calibration"]["refused"] == ["ignore_eos"] and data["calibration"]["options"] == {"temperature": 0.0}
    assert engine.calls and not data["calibration"]["tools"]
    assert {c["strategy"] for c in data["cells"].values()} == {"keep-recent"}
    assert any("offload is left out" in line for line in lines)


def test_more_batches_have_the_tool_time_of_the_first(tmp_path: Path) -> None:
    """What the file holds decides, so that all cells of a kind can be compared."""
    file = tmp_path / "ttft.json"
    short = replace(SMALL, turns=3, tool_s=None)
    first, _ = measured("keep-recent:1:1", file=file, settings=short)
    changed = read(file)
    changed["calibration"]["prefill"] /= 4
    write(Output("--json", file), changed)
    more, _ = measured("keep-recent:1:2", file=file, settings=short)
    assert len(more["cells"]) == 4
    assert {c["tool_s"] for c in more["cells"].values()} == {c["tool_s"] for c in first["cells"].values()}


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes no time at all."""
    at_once(monkeypatch)


def test_the_command_measures_reports_and_writes(
    fast: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables on the screen, every turn in one file, every figure in another, plots in a folder."""
    file, figures = tmp_path / "ttft.json", tmp_path / "figures.json"
    run = [*FAST_RUN, "--plan", "keep-recent:1:1", "--json", str(file), "--figures", str(figures)]
    assert main([*run, "--plots", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "keep-recent, 1 at once, lookahead" in said and "reached?" in said and "too few" in said
    assert len(read(file)["cells"]) == 2 and len(json.loads(figures.read_text())["ttft"]["arms"]) == 2
    assert sorted(p.name for p in tmp_path.glob("*.svg")) == [
        "ttft-before-after.svg",
        "ttft-keep-recent-1-cdf.svg",
        "ttft-keep-recent-1-turns.svg",
    ]
    file.rename(tmp_path / "other.json")
    assert main(["bench", "ttft", "--report", str(tmp_path / "other.json"), "--figures", str(figures)]) == 0
    assert "reached?" in capsys.readouterr().out
    assert list(json.loads(figures.read_text())) == ["other"]


def test_files_of_one_name_are_all_reported(fast: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with figures and plots of its own, named by their folders; one that is given twice counts once."""
    files = [tmp_path / place / "t.json" for place in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        assert main([*FAST_RUN, "--plan", "keep-recent:1:1", "--json", str(file)]) == 0
    capsys.readouterr()
    figures = tmp_path / "figures.json"
    report = ["bench", "ttft", "--report", *map(str, files), str(files[0])]
    assert main([*report, "--figures", str(figures), "--plots", str(tmp_path)]) == 0
    assert list(json.loads(figures.read_text())) == ["a-t", "b-t"]
    said = capsys.readouterr().out
    assert said.index("a-t: fake://engine#fake") < said.index("b-t: fake://engine#fake")
    assert len(list(tmp_path.glob("a-t-*.svg"))) == len(list(tmp_path.glob("b-t-*.svg"))) == 3
    assert list(ttft._names([Path("x/t.json"), Path("x/t.txt")])) == ["1-t", "2-t"]


def test_ctrl_c_ends_it_cleanly(fast: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130; what was measured stays, and the engine is closed."""
    file, real, count = tmp_path / "ttft.json", measure, 0

    async def interrupted(*arguments: Any, **options: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return await real(*arguments, **options)

    monkeypatch.setattr("smoothctx.bench.ttft.measure", interrupted)
    run = [*FAST_RUN, "--plan", "keep-recent:1:1", "--json", str(file)]
    assert main(run) == 130
    assert len(read(file)["cells"]) == 1
    assert main(run) == 0 and len(read(file)["cells"]) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--url", "http://x/v1"], "--name"),
        (["--turns", "1"], "--turns 1"),
        (["--window", "512"], "--window 512"),
        (["--turn-tokens", "1"], "--turn-tokens 1: expected at least 40"),
        (["--tool", "-1"], "--tool -1"),
        (["--path", "/nowhere/at/all"], "--path /nowhere/at/all"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json"),
        (["--figures", "/nowhere/at/all.json"], "--figures /nowhere/at/all.json"),
        (["--plots", "/nowhere/at/all"], "--plots /nowhere/at/all"),
        (["--report", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--sessions", "0"], "--sessions 0"),
        (["--saturated", "0"], "--saturated 0"),
        (["--plan", "other:1:1"], "--plan"),
        (["--plan", "isolate:1:1", "--sessions", "9"], "--sessions"),
        (["--plan", "isolate:1:1", "--saturated", "0"], "--saturated 0"),
        (["--json", "/"], "--json /: that is a folder"),
        (["--figures", "/"], "--figures /: that is a folder"),
        (["--json", "/tmp/t.json", "--figures", "/tmp/t.json"], "--figures /tmp/t.json"),
        (["--report", "/tmp/t.json", "--figures", "/tmp/t.json"], "--figures /tmp/t.json"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    assert main(["bench", "ttft", *arguments]) == 1
    assert named in capsys.readouterr().err


def test_options_make_the_plan() -> None:
    """The default is that of the aims; options choose from it or change it."""

    def plan(*arguments: str) -> Any:
        parser = argparse.ArgumentParser()
        ttft.add_parser(parser.add_subparsers())
        return ttft._plan(parser.parse_args(["ttft", *arguments]))

    assert plan() == DEFAULT_PLAN
    assert plan("--strategies", "offload", "--saturated") == {"offload": {1: 4}, "saturated": {4: 8}}
    assert plan("--strategies", "summarise", "--concurrency", "1", "4", "--sessions", "2") == {
        "summarise": {1: 2, 4: 2}
    }
    assert plan("--plan", "isolate:1:3") == {"isolate": {1: 3}}
    assert plan("--plan", "isolate:1:3", "--saturated", "6") == {"isolate": {1: 3}, "saturated": {6: 12}}
    assert plan("--plan", "saturated:6:18", "--saturated", "6") == {"saturated": {6: 18}}, "what the plan says"


async def test_too_little_to_read_is_an_error(tmp_path: Path) -> None:
    """It names the folder."""
    (tmp_path / "a.md").write_text("short", encoding="utf-8")
    with pytest.raises(SmoothctxError, match="not enough readable text"):
        await ttft.run(
            Fake(),
            SMALL,
            {"summarise": {1: 1}},
            tmp_path,
            out=Output("--json", None),
            say=lambda line: None,
            clock=lambda: 0.0,
        )

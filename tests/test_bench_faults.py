"""What goes wrong around a benchmark: full disks, damaged files, servers with limits, sizes that cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from full_disk import Disk, disk
from smoothctx.bench import qa, ttft_report, volume
from smoothctx.bench.ttft_file import read
from smoothctx.bench.ttft_plan import MODES, STRATEGIES, Settings, pool
from smoothctx.bench.ttft_strategies import policy
from smoothctx.cli import main
from smoothctx.doctor import Examination
from smoothctx.economics import Speed
from smoothctx.engines import Capabilities
from smoothctx.errors import ConfigurationError, EngineError, EngineOverloaded, EngineRefused
from smoothctx.testing import FakeEngine
from ttft_fakes import FAST_RUN, SMALL, SOURCES, Fake, at_once, measured

__all__ = ("disk",)
SHORT = replace(SMALL, turns=3)


# -- full disks --------------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_no_measurement(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on and its table is printed; said once, exit code 1, and the file is that of before."""
    at_once(monkeypatch)
    file = tmp_path / "ttft.json"
    run = [*FAST_RUN, "--json", str(file), "--plan"]
    disk.full = False
    assert main([*run, "keep-recent:1:1"]) == 0
    before = file.read_bytes()
    disk.full = True
    capsys.readouterr()
    assert main([*run, "keep-recent:1:3"]) == 1
    said = capsys.readouterr()
    assert "; 6 cells" in said.out and "keep-recent, 1 at once, lookahead" in said.out, "with those in memory"
    assert said.err.count("could not be written") == 1 and f"every turn: {file} was NOT written" in said.out
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
    disk.full = False
    assert main([*run, "keep-recent:1:3"]) == 0 and len(read(file)["cells"]) == 6


def test_a_disk_that_has_room_again_is_written(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next cell brings those before it along: nothing is missing in the end."""
    file = tmp_path / "ttft.json"

    def say(line: str) -> None:
        disk.full = disk.full and not line.startswith("  1/2")  # said after the first cell

    measured("keep-recent:1:1", settings=SHORT, file=file, say=say)
    assert len(read(file)["cells"]) == 2 and capsys.readouterr().err.count("could not be written") == 1


@pytest.mark.parametrize("option", ["--figures", "--plots"])
def test_a_report_that_cannot_be_written_is_still_shown(
    option: str, tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the figures or plots of before stay as they were."""
    disk.full = False
    file, folder = tmp_path / "t.json", tmp_path / "out"
    folder.mkdir()
    measured("keep-recent:1:1", settings=SHORT, file=file)
    place = folder / "f.json" if option == "--figures" else folder
    report = ["bench", "ttft", "--report", str(file), option, str(place)]
    assert main(report) == 0
    before = {p: p.read_bytes() for p in folder.iterdir()}
    assert before
    disk.full = True
    capsys.readouterr()
    assert main(report) == 1
    said = capsys.readouterr()
    assert "reached?" in said.out and "was NOT written" in said.out and "could not be written" in said.err
    assert {p: p.read_bytes() for p in folder.iterdir()} == before


def test_the_other_commands_show_what_they_measured(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``bench qa``, ``bench volume`` and ``doctor``: the table, one line about the file, exit code 1."""

    def engine(*_: Any, **__: Any) -> FakeEngine:
        return FakeEngine("words " * 10, speed=Speed(float("inf"), float("inf")))

    async def examine(*_: Any, **__: Any) -> Examination:
        return Examination(Capabilities(), [])

    monkeypatch.setattr(volume, "OpenAIEngine", engine)
    monkeypatch.setattr(qa, "OpenAIEngine", engine)
    monkeypatch.setattr("smoothctx.doctor.main.examine", examine)
    file = tmp_path / "x.json"
    server = ["--url", "http://x/v1", "--name", "m", "--quick"]
    for arguments, shown in (
        (["bench", "volume", *server], "Spearman"),
        (["bench", "qa", *server, "--kinds", "multi_hop"], "blocks 400 concise"),
        (["doctor", "http://127.0.0.1:9", "--model", "m"], "volatile prefix"),
    ):
        assert main([*arguments, "--json", str(file)]) == 1
        said = capsys.readouterr()
        assert shown in said.out and f"{file} was NOT written" in said.out
        assert said.err.count("could not be written (No space") == 1 and not list(tmp_path.iterdir())


# -- damaged files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda data: data.pop("engine"), "engine is missing"),
        (lambda data: data.pop("settings"), "settings is missing"),
        (lambda data: data.pop("calibration"), "calibration is missing"),
        (lambda data: data["calibration"].pop("decode"), "calibration.decode is missing"),
        (lambda data: data["calibration"].update(prefill=float("nan")), "calibration.prefill is 'nan'"),
        (lambda data: data.update(cells=[]), "cells is no object"),
        (lambda data: data["cells"].update(a={}), "cells.a.strategy is missing"),
        (lambda data: data["cells"].update(a=3), "cells.a is no object"),
        (lambda data: cell(data).update(mode=["x"]), "mode is \"['x']\""),
        (lambda data: cell(data).update(concurrency=0), "concurrency is '0'"),
        (lambda data: cell(data).update(sessions={}), "sessions is no list"),
        (lambda data: cell(data)["counters"].pop("usage"), "counters.usage is missing"),
        (lambda data: cell(data)["sessions"][0]["turns"][1].pop("ttft_ms"), r"sessions[0].turns[1].ttft_ms is missing"),
        (lambda data: cell(data)["sessions"][0]["turns"][1].update(transform=1), "transform is '1'"),
    ],
)
def test_a_file_of_which_no_figure_can_be_made_is_named(
    spoil: Callable[[dict[str, Any]], Any], named: str, whole: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is missing; to report it and to go on from it."""
    data, file = json.loads(whole), tmp_path / "t.json"
    spoil(data)
    file.write_text(json.dumps(data))
    for arguments in (["--report", str(file)], ["--report", str(file), "--figures", str(tmp_path / "f.json")]):
        assert main(["bench", "ttft", *arguments]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"smoothctx: {file}: it is not a whole file of this benchmark (") and named in said
    with pytest.raises(ConfigurationError, match="not a whole file of this benchmark"):
        measured("keep-recent:1:1", settings=SHORT, file=file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a file with two cells."""
    file = tmp_path_factory.mktemp("whole") / "t.json"
    measured("keep-recent:1:1", settings=SHORT, file=file)
    return file.read_text()


def cell(data: dict[str, Any]) -> dict[str, Any]:
    """Its first one."""
    found: dict[str, Any] = next(iter(data["cells"].values()))
    return found


def test_what_a_file_holds_besides_does_no_harm(whole: str, tmp_path: Path) -> None:
    """A newer version may write more."""
    data, file = json.loads(whole), tmp_path / "t.json"
    data["more"] = cell(data)["more"] = cell(data)["sessions"][0]["turns"][0]["more"] = None
    file.write_text(json.dumps(data))
    assert "reached?" in ttft_report.text(read(file))


# -- servers that limit requests ---------------------------------------------------------------------------------------


class Limited(Fake):
    """Refuses each of these calls (by their number); ``asked`` are the times of all."""

    def __init__(self, *numbers: int, asks_s: float | None = 7.0, status: int = 429) -> None:
        super().__init__()
        self.numbers, self.asks_s, self.status = set(numbers), asks_s, status
        self.asked: list[float] = []

    def _check(self, call: Any) -> Any:
        self.asked.append(self.clock())
        if len(self.asked) in self.numbers:
            raise EngineOverloaded("slow down", status=self.status, retry_after_s=self.asks_s)
        return super()._check(call)


#: calls before the first cell
CALIBRATION = 10


@pytest.mark.parametrize("number", range(1, CALIBRATION + 1))
def test_a_single_429_does_not_end_the_calibration(number: int) -> None:
    """Whichever call it meets: it is made again when the server wishes, and only the answer is timed."""
    lines: list[str] = []
    data, engine = measured("keep-recent:1:1", settings=SHORT, engine=lambda: Limited(number), say=lines.append)
    assert isinstance(engine, Limited) and engine.asked[number] - engine.asked[number - 1] >= 7
    found = data["calibration"]
    assert found["prefill"] == pytest.approx(400, rel=0.1) and found["decode"] == pytest.approx(40, rel=0.1)
    assert found["minimal_ms"] < 100 and found["tools"] and not found["refused"]
    told = "the server is overloaded or limits requests (429): again in 7 s"
    assert lines.count(told) == 1 and len(data["cells"]) == 2


def test_a_cell_that_meets_a_limit_is_measured_again_when_the_server_wishes() -> None:
    """Also where it meets one more than once: a run of hours does not end by that."""
    lines: list[str] = []
    first = CALIBRATION + 1
    data, engine = measured(
        "keep-recent:1:1", settings=SHORT, engine=lambda: Limited(*range(first, first + 5)), say=lines.append
    )
    assert isinstance(engine, Limited) and len(data["cells"]) == 2
    times = engine.asked[first - 1 : first + 5]
    assert all(b - a >= 7 for a, b in zip(times, times[1:], strict=False))
    told = "keep-recent/inline/1/0: the server is overloaded or limits requests (429): again in 7 s"
    assert lines.count(told) == 5
    assert all(len(c["sessions"][0]["turns"]) == 3 for c in data["cells"].values()), "from their beginning"


def test_a_server_that_limits_without_end_ends_the_run(tmp_path: Path) -> None:
    """After six tries of one cell; what was measured before stays."""
    file = tmp_path / "t.json"
    measured("keep-recent:1:1", settings=SHORT, file=file)
    before = file.read_bytes()
    with pytest.raises(EngineOverloaded, match="slow down") as ended:
        measured("keep-recent:1:2", settings=SHORT, file=file, engine=lambda: Limited(*range(1, 99), status=503))
    assert ended.value.status == 503 and file.read_bytes() == before


@pytest.mark.parametrize("number", [1, CALIBRATION + 1])
def test_nobody_waits_for_more_than_an_hour(number: int) -> None:
    """The error says when to start again."""
    with pytest.raises(EngineOverloaded, match="asks to be left alone for 7200 s: start again then"):
        measured("keep-recent:1:1", settings=SHORT, engine=lambda: Limited(number, asks_s=7200.0))


def test_a_tool_result_that_the_template_does_not_take_is_asked_once() -> None:
    """A plain 500 in that place is an answer, not an overload."""
    lines: list[str] = []

    class NoTools(Limited):
        def _check(self, call: Any) -> Any:
            if any(m["role"] == "tool" for m in call.messages):
                raise EngineOverloaded("Value is not callable", status=500)
            return super()._check(call)

    data, _ = measured("keep-recent:1:1", settings=SHORT, engine=NoTools, say=lines.append)
    assert not data["calibration"]["tools"] and not any("again in" in line for line in lines)


def test_the_tokenizer_of_a_server_is_asked_patiently() -> None:
    """The first calls of all are those that cut the texts."""

    class Busy(Fake):
        left = 1

        async def count_tokens(self, text: str) -> int:
            if self.left:
                self.left -= 1
                raise EngineOverloaded("slow down", status=429, retry_after_s=5.0)
            return -(-len(text) // 4)

    def busy() -> Fake:
        engine = Busy()
        engine.capabilities = replace(engine.capabilities, tokenize=True)
        return engine

    lines: list[str] = []
    data, _ = measured("keep-recent:1:1", settings=SHORT, engine=busy, say=lines.append)
    assert len(data["cells"]) == 2 and sum("again in 5 s" in line for line in lines) == 1


def test_an_error_of_another_kind_waits_for_nothing() -> None:
    """What the server refuses is measured once more at once, as before."""
    lines: list[str] = []

    class Refusing(Limited):
        def _check(self, call: Any) -> Any:
            try:
                return super()._check(call)
            except EngineOverloaded:
                raise EngineRefused("no", status=400) from None

    measured("keep-recent:1:1", settings=SHORT, engine=lambda: Refusing(CALIBRATION + 1), say=lines.append)
    assert lines.count("keep-recent/inline/1/0: no; once more") == 1
    with pytest.raises(EngineError, match="no"):
        measured("keep-recent:1:1", settings=SHORT, engine=lambda: Refusing(CALIBRATION + 1, CALIBRATION + 2))


# -- sizes that cannot work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_settings_allow_makes_a_policy(strategy: str, mode: str) -> None:
    """The least of everything, which is checked before anything is started: no option of ours is named later."""
    least = Settings(turns=2, turn_tokens=40, reply_tokens=2, summary_tokens=1, long=1, isolate_every=2, window=100)
    least.check()
    assert policy(strategy, mode, least, FakeEngine("x"))
    with pytest.raises(ConfigurationError, match="^--turn-tokens 39: expected at least 40"):
        replace(least, turn_tokens=39).check()


async def test_a_turn_without_room_for_a_text_is_named() -> None:
    """As the engine counts: where a token is a character the question alone has more."""

    async def characters(text: str) -> int:
        return len(text)

    with pytest.raises(
        ConfigurationError, match=r"^--turn-tokens 60: the question of a turn has \d+ of them; expected"
    ):
        await pool(SOURCES, replace(SMALL, turn_tokens=60), characters)

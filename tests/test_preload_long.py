"""Preload by long requests that give way: aborted by a turn, timed for when none is expected, beside decode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from prefix_server import (
    STUB,
    Message,
    Server,
    always,
    conversation,
    foreground,
    loop_time,
    preloader,
    text,
    with_turns,
)
from smoothctx.engines import PreloadReport
from smoothctx.engines.preload import MIN_CHUNK, Warmth
from smoothctx.foreground import Foreground
from virtual import run_virtual


def test_abort_is_one_request() -> None:
    """Undisturbed, the whole view goes out once."""
    server, view = Server(), conversation()

    async def main() -> PreloadReport:
        return await preloader(strategy="abort").run(server.send, lambda: view, foreground=foreground(), needed=always)

    report = run_virtual(main)
    assert report.complete and report.requests == 1 and [text(m) for m in server.sent] == [text([*view, STUB])]
    assert all(a is b for a, b in zip(server.sent[0][:-1], view, strict=True))


def test_abort_gives_way_at_once_and_goes_on_from_what_stayed() -> None:
    """Each turn aborts it; an engine that keeps what it evaluated is done after about the same work in all."""
    server, view = Server(rate=1_000.0), conversation(turns=6)

    async def main() -> PreloadReport:
        def work(front: Foreground) -> Any:
            return preloader(strategy="abort").run(
                server.send, lambda: view, foreground=front, needed=always, keeps=True
            )

        report: PreloadReport = await with_turns(server, work, pause=0.5, length=0.2)
        return report

    report = run_virtual(main)
    assert report.complete and report.requests == 1 and report.aborted == server.aborted >= 5
    assert {text(m) for m in server.sent} == {text([*view, STUB])}


def test_what_an_aborted_request_evaluated_is_not_cold() -> None:
    """Where it stays, time is not short because of it: with a known rate the account follows what the server has."""
    server, view, warmth = Server(rate=1_000.0), conversation(turns=6), Warmth()
    told: list[tuple[float, float]] = []

    async def main() -> None:
        own = preloader(strategy="abort")
        await own.run(server.send, lambda: conversation(turns=1), foreground=foreground(), needed=always, keeps=True)
        server.cached = ""

        def work(front: Foreground) -> Any:
            def hurried(rate: float | None) -> bool:
                there = len(server.cached) / len(text(view))
                told.append((warmth.cold(view), 1 - there))
                return False

            return own.run(
                server.send,
                lambda: view,
                foreground=front,
                needed=always,
                hurried=hurried,
                keeps=True,
                warmth=warmth,
            )

        await with_turns(server, work, pause=0.5, length=0.2, decoding=0.2)

    run_virtual(main)
    assert server.aborted >= 5 and len(told) >= 5
    assert all(cold == pytest.approx(true, abs=0.05) for cold, true in told)
    assert warmth.cold(view) == 0 and warmth.cold([*view, *view]) == pytest.approx(0.5)
    warmth.drop()
    assert warmth.cold(view) == 1


def test_aborts_that_lead_nowhere_end() -> None:
    """An engine that keeps nothing of an aborted request would never be done: growing prefixes take over."""
    view = conversation(turns=6)

    class Forgetful(Server):
        async def send(self, messages: Sequence[Message]) -> Any:
            before = self.cached
            try:
                return await super().send(messages)
            except anyio.get_cancelled_exc_class():
                self.cached = before
                raise

    server = Forgetful(rate=1_000.0)

    async def main() -> PreloadReport:
        def work(front: Foreground) -> Any:
            return preloader(strategy="abort").run(server.send, lambda: view, foreground=front, needed=always)

        report: PreloadReport = await with_turns(server, work, pause=0.8, length=0.2)
        return report

    report = run_virtual(main)
    whole = text([*view, STUB])
    assert report.complete and [text(m) for m in server.sent[:3]] == [whole] * 3
    assert len(text(server.sent[3])) < len(whole) and text(server.sent[-1]) == whole


def evaluated(server: Server) -> list[int]:
    """Characters that each request added to what was cached."""
    sizes = [0, *(len(text(m)) for m in server.sent)]
    return [b - a for a, b in itertools.pairwise(sizes)]


@pytest.mark.parametrize("quiet_s", [2.0, 0.0, 60.0])
def test_timed_is_long_until_a_turn_is_expected_and_grows_from_then_on(quiet_s: float) -> None:
    """One request for what is evaluated until then; a turn that comes later waits for one chunk at most."""
    server, view = Server(rate=1_000.0), conversation(turns=6)
    total = len(text([*view, STUB]))

    async def main() -> PreloadReport:
        own = preloader(strategy="timed", chunk_delay_s=0.2)
        began = loop_time()
        return await own.run(
            server.send,
            lambda: view,
            foreground=foreground(),
            needed=always,
            keeps=True,
            known_rate=1_000.0 / 4,
            quiet=lambda: max(0.0, quiet_s - (loop_time() - began)),
        )

    assert run_virtual(main).complete and text(server.sent[-1]) == text([*view, STUB])
    first, *others = evaluated(server)
    assert first == pytest.approx(min(total, max(200, 1_000 * quiet_s)), rel=0.15)
    assert len(others) == 0 if quiet_s == 60 else len(others) >= 5 and max(others) <= 200 * 1.3


def test_timed_goes_on_from_what_an_aborted_request_evaluated() -> None:
    """A turn comes earlier than was expected: the next request reaches beyond what stayed."""
    server, view = Server(rate=1_000.0), conversation(turns=6)

    async def main() -> PreloadReport:
        def work(front: Foreground) -> Any:
            return preloader(strategy="timed").run(
                server.send,
                lambda: view,
                foreground=front,
                needed=always,
                keeps=True,
                known_rate=1_000.0 / 4,
                quiet=lambda: 1.0,
            )

        report: PreloadReport = await with_turns(server, work, pause=0.5, length=0.2)
        return report

    report = run_virtual(main)
    lengths = [len(text(m)) for m in server.sent]
    assert report.complete and server.aborted >= 5
    assert all(b - a == pytest.approx(500, rel=0.2) for a, b in itertools.pairwise(lengths[:-2])), lengths


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("rate", [None, 250.0])
@pytest.mark.parametrize("quiet_s", [None, 0.0])
def test_timed_without_an_expectation_is_one_request(quiet_s: float | None, rate: float | None, keeps: bool) -> None:
    """No idle time was seen yet. Where one was, an unknown rate is no reason for a long one: a chunk tells it."""
    server, view = Server(rate=1_000.0), conversation()

    async def main() -> PreloadReport:
        return await preloader(strategy="timed").run(
            server.send,
            lambda: view,
            foreground=foreground(),
            needed=always,
            keeps=keeps,
            known_rate=rate,
            quiet=lambda: quiet_s,
        )

    report = run_virtual(main)
    assert report.complete and (report.requests == 1) == (quiet_s is None)
    assert max(evaluated(server)[1:], default=0) <= MIN_CHUNK * 2


def test_the_strategy_is_asked_each_time() -> None:
    """What a probe finds later counts from then on."""
    server, view, now = Server(), conversation(), ["growing"]

    async def main() -> tuple[PreloadReport, PreloadReport]:
        own = preloader(strategy=lambda: now[0])
        first = await own.run(server.send, lambda: view, foreground=foreground(), needed=always)
        now[0] = "abort"
        return first, await own.run(server.send, lambda: view, foreground=foreground(), needed=always)

    first, second = run_virtual(main)
    assert first.requests > 1 and second.requests == 1


@pytest.mark.parametrize("strategy", ["growing", "abort"])
@pytest.mark.parametrize("hurried", [True, False])
def test_only_when_hurried_it_runs_beside_decode(strategy: Any, hurried: bool) -> None:
    """While a turn decodes, requests begin only if time is short; while one prefills, never."""
    server, view = Server(rate=2_000.0), conversation(turns=8)
    rates: list[float | None] = []

    def short(rate: float | None) -> bool:
        rates.append(rate)
        return hurried

    spans: list[tuple[float, float]] = []

    async def main() -> PreloadReport:
        def work(front: Foreground) -> Any:
            return preloader(strategy=strategy).run(
                server.send, lambda: view, foreground=front, needed=always, hurried=short, keeps=True
            )

        report: PreloadReport = await with_turns(server, work, pause=0.25, length=0.25, decoding=0.5)
        spans.extend((k + 0.25, k + 0.5) for k in range(60))
        return report

    report = run_virtual(main)
    assert report.complete and rates
    assert not [t for t in server.started for a, b in spans if a <= t < b]
    decoding = [t for t in server.started for a, b in spans if b <= t < b + 0.5 - 1e-9]
    assert bool(decoding) == hurried

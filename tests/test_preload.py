"""Preload by growing prefixes: what is sent, when, and how large, under virtual time."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, strategies as st

from prefix_server import (
    STUB,
    Message,
    Reply,
    Server,
    always,
    conversation,
    foreground,
    in_common,
    loop_time,
    preloader,
    text,
)
from smoothctx import EngineRefused, EngineUnreachable, Usage
from smoothctx.engines import OpenAIEngine, PreloadReport
from smoothctx.engines.preload import FIRST_CHUNK, MIN_CHUNK, Warmth, head, valid
from virtual import run_virtual


def test_each_prefix_extends_the_last() -> None:
    """Every request holds what the one before held and more; the last one is the whole view, its own messages."""
    server, view = Server(), conversation()

    async def main() -> PreloadReport:
        return await preloader().run(server.send, lambda: view, foreground=foreground(), needed=always)

    report = run_virtual(main)
    prompts = [text(m) for m in server.sent]
    assert len(prompts) > 3
    for before, after in itertools.pairwise(prompts):
        stem = before.removesuffix("<user>.")
        assert after.startswith(stem) and len(after) > len(stem)
    assert all(a is b for a, b in zip(server.sent[-1], [*view, server.sent[-1][-1]], strict=True))
    assert server.sent[-1][-1] == STUB
    assert report.complete and report.requests == len(prompts) and report.aborted == 0
    assert report.tokens == len(prompts[-1]) // 4 + 1
    assert report.usage.calls == len(prompts) and report.usage.cached_tokens is not None


def test_chunks_take_the_time_they_may() -> None:
    """The chunk follows the measured rate, so that each takes about chunk_delay_s."""
    server, view = Server(rate=20_000.0), conversation(turns=40)

    async def main() -> PreloadReport:
        return await preloader(chunk_delay_s=0.1).run(server.send, lambda: view, foreground=foreground(), needed=always)

    assert run_virtual(main).complete
    gaps = [b - a for a, b in itertools.pairwise(server.started)]
    assert all(gap <= 0.13 for gap in gaps)
    assert all(0.08 <= gap for gap in gaps[4:-1]), gaps
    sizes = [len(text(m)) for m in server.sent]
    assert sizes[0] <= FIRST_CHUNK + 40


def test_slow_server_gets_the_smallest_chunks() -> None:
    """A slow server is asked for little at a time, never for nothing."""
    server, view = Server(rate=100.0), conversation(turns=2)

    async def main() -> PreloadReport:
        return await preloader().run(server.send, lambda: view, foreground=foreground(), needed=always)

    assert run_virtual(main).complete
    sizes = [len(text(m)) for m in server.sent]
    assert all(b - a <= MIN_CHUNK * 1.25 + 40 for a, b in itertools.pairwise(sizes[1:]))


@pytest.mark.parametrize("known", [None, 25.0, 100.0, 5000.0])
def test_the_first_chunk_follows_what_is_known_of_the_engine(known: float | None) -> None:
    """Its other calls have shown how fast it is: the first chunk takes no longer than the others may."""
    server, view = Server(rate=4 * (known or 100.0)), conversation(turns=8)

    async def main() -> PreloadReport:
        own = preloader(chunk_delay_s=1.0)
        return await own.run(server.send, lambda: view, foreground=foreground(), needed=always, known_rate=known)

    assert run_virtual(main).complete
    expected = FIRST_CHUNK if known is None else min(2 * FIRST_CHUNK, max(MIN_CHUNK, 4 * int(known)))
    assert sum(len(m["content"]) for m in server.sent[0] if m != STUB) == expected


@pytest.mark.parametrize("reports", [True, False])
def test_a_cached_beginning_does_not_make_the_chunks_explode(reports: bool) -> None:
    """What the server had cached already is fast, and says nothing of its rate."""
    view = conversation(turns=30)
    server = Server(rate=5_000.0, cached=text(view[:3]), reports_cache=reports)

    async def main() -> PreloadReport:
        return await preloader().run(server.send, lambda: view, foreground=foreground(), needed=always)

    assert run_virtual(main).complete
    gaps = [b - a for a, b in itertools.pairwise(server.started)]
    assert max(gaps) <= (0.2 if reports else 0.75)


def test_nothing_is_sent_while_a_turn_is_open() -> None:
    """No request begins between the begin and the end of a turn."""
    server, view = Server(rate=3_000.0), conversation()
    busy: list[tuple[float, float]] = []

    async def main() -> PreloadReport:
        front = foreground()
        report: list[PreloadReport] = []

        async def work() -> None:
            report.append(await preloader().run(server.send, lambda: view, foreground=front, needed=always))
            group.cancel_scope.cancel()

        async def agent() -> None:
            for k in range(100):
                front.begin(k)
                start = loop_time()
                await anyio.sleep(0.3)
                busy.append((start, loop_time()))
                front.end(k)
                await anyio.sleep(0.25)

        async with anyio.create_task_group() as group:
            group.start_soon(agent)
            group.start_soon(work)
        return report[0]

    report = run_virtual(main)
    assert report.complete and busy
    assert not [t for t in server.started for a, b in busy if a <= t < b]
    assert report.aborted == server.aborted


def test_a_turn_that_begins_aborts_the_request() -> None:
    """A request under way gives way at once, and is sent again after the turn."""
    server, view = Server(rate=100.0), conversation(turns=1)

    async def main() -> tuple[PreloadReport, list[int]]:
        front = foreground()
        seen: list[int] = []

        async def agent() -> None:
            await anyio.sleep(1.0)
            front.begin("turn")
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            seen.append(server.aborted)
            await anyio.sleep(10.0)
            seen.append(len(server.sent))
            front.end("turn")

        async with anyio.create_task_group() as group:
            group.start_soon(agent)
            report = await preloader().run(server.send, lambda: view, foreground=front, needed=always)
        return report, seen

    report, seen = run_virtual(main)
    assert seen == [1, 1]
    assert report.complete and report.aborted == 1
    assert server.started[1] == pytest.approx(11.0)
    assert text(server.sent[0]) == text(server.sent[1])


def test_a_turn_that_is_open_already_sends_nothing() -> None:
    """Where the foreground is busy at the start, and stays so, nothing goes out."""
    server = Server()

    async def main() -> None:
        front = foreground()
        front.begin("turn")
        with anyio.move_on_after(60.0):
            await preloader().run(server.send, conversation, foreground=front, needed=always)

    run_virtual(main)
    assert server.sent == []


def test_a_turn_that_never_reports_its_end_counts_for_the_lease() -> None:
    """A forgotten turn does not stop preload for ever."""
    server = Server()

    async def main() -> PreloadReport:
        front = foreground()
        front.begin("forgotten")
        return await preloader().run(server.send, conversation, foreground=front, needed=always)

    assert run_virtual(main).complete
    assert server.started[0] == pytest.approx(120.0)


def test_a_view_that_grows_meanwhile_is_warmed_to_its_end() -> None:
    """Messages that come while a preload runs are part of it."""
    server, view = Server(), conversation(turns=4)
    more = {"role": "user", "content": "one more question " * 20}

    async def main() -> PreloadReport:
        async def grow() -> None:
            if len(server.sent) == 3:
                view.append(more)

        server.before = grow
        return await preloader().run(server.send, lambda: view, foreground=foreground(), needed=always)

    assert run_virtual(main).complete
    assert text(server.sent[-1]) == text(view) and server.sent[-1][-1] is more
    assert len({text(m) for m in server.sent}) == len(server.sent)


def test_promise_15_another_view_starts_anew() -> None:
    """A view that is not the old one grown is not called warm for what was sent of the old one."""
    server, old, new = Server(), conversation(turns=6), conversation(turns=2)[1:]
    views = [old]

    async def main() -> PreloadReport:
        async def switch() -> None:
            if len(server.sent) == 4:
                views[0] = new

        server.before = switch
        return await preloader().run(server.send, lambda: views[0], foreground=foreground(), needed=always)

    assert run_virtual(main).complete
    assert text(server.sent[-1]) == text([*new, STUB])


def test_not_needed_stops_it() -> None:
    """Once it is not needed nothing more is sent, and nothing is called complete."""
    server, view = Server(), conversation()

    async def main() -> PreloadReport:
        return await preloader().run(
            server.send, lambda: view, foreground=foreground(), needed=lambda: len(server.sent) < 2
        )

    report = run_virtual(main)
    assert not report.complete and report.requests == len(server.sent) == 2
    assert report.tokens == report.usage.input_tokens - len(text(server.sent[0])) // 4 - 1


def test_not_needed_from_the_start() -> None:
    """Nothing is sent at all."""
    server = Server()

    async def main() -> PreloadReport:
        return await preloader().run(server.send, conversation, foreground=foreground(), needed=lambda: False)

    assert run_virtual(main) == PreloadReport(complete=False) and server.sent == []


def test_not_needed_while_a_turn_begins_is_no_second_request() -> None:
    """An aborted request is not sent again when nobody wants it any more."""
    server, state = Server(rate=10.0), {"needed": True}

    async def main() -> PreloadReport:
        front = foreground()

        async def agent() -> None:
            await anyio.sleep(1.0)
            state["needed"] = False
            front.begin("turn")
            front.end("turn")

        async with anyio.create_task_group() as group:
            group.start_soon(agent)
            report = await preloader().run(server.send, conversation, foreground=front, needed=lambda: state["needed"])
        return report

    report = run_virtual(main)
    assert (report.complete, report.aborted, report.requests) == (False, 1, 0) and len(server.sent) == 1


def test_what_was_refused_has_left_nothing() -> None:
    """Nothing is taken for warm after a refusal, nor was the place touched; what an earlier request left stays."""
    server, view, warmth = Server(), conversation(), Warmth()

    async def main() -> None:
        async def refuse() -> None:
            raise EngineRefused("no", status=400)

        server.before = refuse
        own = preloader(strategy="abort")
        for begun in (False, True):
            with pytest.raises(EngineRefused):
                await own.run(server.send, lambda: view, foreground=foreground(), needed=always, warmth=warmth)
            assert warmth.begun is begun and warmth.held == 0
            warmth.begun = True

    run_virtual(main)


def test_errors_pass_as_they_are() -> None:
    """What the server raised comes out bare, not in a group."""

    async def main() -> None:
        async def send(messages: Sequence[Message]) -> Any:
            raise EngineUnreachable("gone")

        with pytest.raises(EngineUnreachable, match="^gone$") as caught:
            await preloader().run(send, conversation, foreground=foreground(), needed=always)
        assert not isinstance(caught.value, BaseExceptionGroup)

    run_virtual(main)


def test_promise_11_cancelling_a_preload_cancels_its_request() -> None:
    """A cancelled preload is cancelled, not finished with a report."""
    server = Server(rate=10.0)

    async def main() -> bool:
        with anyio.move_on_after(1.0) as scope:
            await preloader().run(server.send, conversation, foreground=foreground(), needed=always)
        return scope.cancelled_caught

    assert run_virtual(main) and server.aborted == 1


def test_empty_view_is_warm() -> None:
    """Nothing to warm is complete at once."""
    server = Server()

    async def main() -> PreloadReport:
        return await preloader().run(server.send, list, foreground=foreground(), needed=always)

    assert run_virtual(main) == PreloadReport(complete=True) and server.sent == []


def test_binding_repeats_the_agents_request() -> None:
    """The default binding's requests carry the agent's own options, one token long."""
    calls: list[dict[str, Any]] = []

    async def main() -> PreloadReport:
        engine = OpenAIEngine("http://127.0.0.1:9", "m")

        async def complete(messages: Sequence[Message], **options: Any) -> Any:
            calls.append(options)
            return Reply(Usage(input_tokens=5, calls=1))

        engine.complete = complete  # type: ignore[method-assign]
        report = await engine.bind("s").preload(
            conversation,
            request={"temperature": 0, "tools": [1], "max_tokens": 700},
            foreground=foreground(),
            needed=always,
            hurried=lambda rate: False,
        )
        await engine.aclose()
        return report

    assert run_virtual(main).complete
    assert calls and all(c == {"temperature": 0, "tools": [1], "max_tokens": 1} for c in calls)


# --- the engine's blocks


@dataclass
class Blocks(Server):
    """A server that reuses whole blocks only; four characters are a token, and a template adds five."""

    block: int = 128

    async def send(self, messages: Sequence[Message]) -> Any:
        """Evaluate what is in no whole block."""
        self.sent.append(list(messages))
        self.started.append(loop_time())
        prompt = text(messages)
        tokens = len(prompt) // 4 + 5
        hit = min(len(in_common(prompt, self.cached)) // 4, tokens - 1) // self.block * self.block
        await anyio.sleep(self.overhead + (tokens - hit) * 4 / self.rate)
        self.cached = prompt
        return Reply(Usage(input_tokens=tokens, output_tokens=1, cached_tokens=hit, calls=1))


@pytest.mark.parametrize("block", [16, 128, 784])
def test_b186_chunks_end_with_a_block(block: int) -> None:
    """Each prefix fills at least one more block of the engine's cache, and leaves little of the next one unused."""
    server, view = Blocks(rate=4_000.0, block=block), conversation(turns=30)

    async def main() -> PreloadReport:
        own = preloader(block_tokens=lambda: block)
        return await own.run(server.send, lambda: view, foreground=foreground(), needed=always)

    report = run_virtual(main)
    assert report.complete
    sizes = [(len(text(m).removesuffix("<user>.")) // 4) for m in server.sent]
    whole = [size // block for size in sizes[2:-1]]
    assert len(whole) > 2 and all(b > a for a, b in itertools.pairwise(whole))
    # the slack behind a block's end is evaluated twice: it stays small
    assert max(size % block for size in sizes[3:-1]) <= max(40, block // 4)


def test_blocks_save_work() -> None:
    """Chunks that end with a block evaluate no more than chunks that do not know of blocks."""
    evaluated = {}
    for block in (None, 128):
        server, view = Blocks(rate=4_000.0, block=128), conversation(turns=30)

        async def main(server: Blocks = server, view: list[Message] = view, block: int | None = block) -> PreloadReport:
            own = preloader(block_tokens=lambda: block)
            return await own.run(server.send, lambda: view, foreground=foreground(), needed=always)

        usage = run_virtual(main).usage
        evaluated[block] = usage.input_tokens - (usage.cached_tokens or 0)
    assert evaluated[128] < 0.8 * (evaluated[None] or 0)


def test_blocks_are_filled_also_where_the_tokens_of_a_text_vary() -> None:
    """The size of a chunk is an estimate: text whose tokens are longer or shorter than before rarely misses a block."""
    words = ["a ", "of ", "token ", "sentences ", "(x) ", "preloading "]

    @dataclass
    class Words(Blocks):
        """A token for each word or mark, so that their density varies along a text."""

        async def send(self, messages: Sequence[Message]) -> Any:
            self.sent.append(list(messages))
            prompt = " ".join(str(m["content"]) for m in messages)
            held = len(re.findall(r"\w+|[()]", prompt))
            hit = min(len(re.findall(r"\w+|[()]", in_common(prompt, self.cached))), held) // self.block * self.block
            await anyio.sleep(0.05 + (held + 5 - hit) / 2_800)
            self.cached = prompt
            return Reply(Usage(input_tokens=held + 5, output_tokens=1, cached_tokens=hit, calls=1))

    draw = random.Random(7)
    view = [{"role": "user", "content": "".join(draw.choices(words, k=700))} for _ in range(6)]
    server = Words(block=128)

    async def main() -> PreloadReport:
        own = preloader(block_tokens=lambda: 128)
        return await own.run(server.send, lambda: view, foreground=foreground(), needed=always)

    report = run_virtual(main)
    assert report.complete
    evaluated = report.usage.input_tokens - (report.usage.cached_tokens or 0)
    assert evaluated < 1.4 * report.tokens


def test_the_delay_is_a_parameter() -> None:
    """Larger chunks take longer each, and are fewer."""
    counts = []
    for delay in (0.05, 0.4):
        server, view = Server(rate=20_000.0), conversation(turns=60)

        async def main(server: Server = server, view: list[Message] = view, delay: float = delay) -> PreloadReport:
            own = preloader(chunk_delay_s=delay)
            return await own.run(server.send, lambda: view, foreground=foreground(), needed=always)

        counts.append(run_virtual(main).requests)
        gaps = [b - a for a, b in itertools.pairwise(server.started)]
        assert max(gaps) <= delay * 1.3
    assert counts[0] > 2 * counts[1]


def test_the_rate_is_in_tokens_per_second() -> None:
    """What the server evaluated alone, by its own count, is the rate that scheduling uses."""
    server, view = Server(rate=4_000.0), conversation(turns=20)

    async def main() -> float | None:
        own = preloader(chunk_delay_s=0.5)
        assert own.rate is None
        await own.run(server.send, lambda: view, foreground=foreground(), needed=always)
        return own.rate

    assert run_virtual(main) == pytest.approx(1_000.0, rel=0.1)


# --- cutting

CALLS: list[Message] = [
    {"role": "system", "content": "s" * 10},
    {"role": "user", "content": "u" * 10},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "x": "y" * 50}, {"id": "b"}]},
    {"role": "tool", "tool_call_id": "a", "content": "A" * 30},
    {"role": "tool", "tool_call_id": "b", "content": "B" * 30},
    {"role": "assistant", "content": "done" * 5},
]


def test_promise_03_a_cut_prompt_is_valid() -> None:
    """Wherever the cut falls, each call has its results, a user's message is there, and no reply stands at the end."""
    for size in range(1, 300):
        part, _ = head(CALLS, size)
        prompt = valid(part, CALLS)
        assert any(m["role"] == "user" for m in prompt)
        called = [c["id"] for m in prompt for c in m.get("tool_calls") or ()]
        assert [m["tool_call_id"] for m in prompt if m["role"] == "tool"] == called
        assert prompt[: len(part)] == part
        assert prompt[-1]["role"] != "assistant"


def test_promise_03_a_view_that_ends_with_a_reply_is_valid() -> None:
    """A server that refuses a prompt with a reply at its end warms it all the same, and the next turn's call finds all
    of the view in the cache."""
    view = conversation(turns=6)

    class Thinking(Server):
        async def send(self, messages: Sequence[Message]) -> Any:
            if messages[-1]["role"] == "assistant":
                raise EngineRefused("Assistant response prefill is incompatible with enable_thinking.", status=400)
            return await super().send(messages)

    for strategy in ("abort", "growing"):
        server, warmth = Thinking(), Warmth()

        async def main(server: Server = server, warmth: Warmth = warmth, strategy: Any = strategy) -> PreloadReport:
            own = preloader(strategy=strategy)
            return await own.run(server.send, lambda: view, foreground=foreground(), needed=always, warmth=warmth)

        assert run_virtual(main).complete
        asked = [*view, {"role": "user", "content": "and then?"}]
        assert len(in_common(text(asked), server.cached)) >= len(text(view))
        assert warmth.covers(view, 0) and warmth.covers(asked, 9) and not warmth.covers(asked, 8)


def test_promise_03_a_whole_view_that_ends_with_an_open_call_is_valid() -> None:
    """A call that still runs gets an empty result in the prompt that warms the view: strict servers refuse it else."""
    server = Server()

    async def main() -> PreloadReport:
        warming = preloader(strategy="abort")
        return await warming.run(server.send, lambda: CALLS[:4], foreground=foreground(), needed=always)

    assert run_virtual(main).complete
    (sent,) = server.sent
    assert sent[:4] == CALLS[:4] and [m.get("tool_call_id") for m in sent[3:]] == ["a", "b"]
    assert sent[4]["content"] == ""


def test_parts_are_counted_and_not_cut() -> None:
    """A message whose content is a list of parts is taken whole, and counts as its text."""
    parts: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "x" * 900}, {"type": "image_url", "image_url": {}}]}
    ]
    part, size = head([*parts, {"role": "assistant", "content": "y" * 50}], 100)
    assert part == parts and size == 900


@given(st.lists(st.text(max_size=40), max_size=6), st.integers(1, 200), st.integers(0, 80))
def test_heads_nest(contents: list[str], size: int, more: int) -> None:
    """A longer head starts with the shorter one, and no head makes anything up."""
    messages = [{"role": "user", "content": c} for c in contents]
    short, long = head(messages, size)[0], head(messages, size + more)[0]
    whole = "\0".join(c for c in contents)
    a, b = ("\0".join(m["content"] for m in h) for h in (short, long))
    assert b.startswith(a) and whole.startswith(b)

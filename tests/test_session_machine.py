"""A stateful test: sessions live through everything a conversation can do, and after every step nothing is lost,
nothing is stale, no request is worse than the history, nothing waits below the hard limit, all is bounded.

Every text carries a mark of its own, and the summariser echoes the marks that it was given: so the view itself
shows what it covers.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from helpers import CODEC, A, Events, FlakyStore, H, Message, S, T, marks, problems, same_objects
from searching import machine_settings
from smoothctx import (
    BreakEven,
    ConfigurationError,
    Finish,
    HandleError,
    HandleState,
    Immediate,
    KeepRecent,
    KStepOff,
    LookaheadHandle,
    Policy,
    Prices,
    Reason,
    Runtime,
    Salvage,
    Session,
    Summarize,
)
from smoothctx.launch import STORE_WAIT
from smoothctx.shelf import MAX_ARTIFACTS
from virtual import VirtualTimeLoop

WINDOW = 1500
LIMIT = int(WINDOW * 0.85)
MAX_WAIT = 30.0


class Model:
    """A summariser whose every call waits until the test says what becomes of it."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[str]] = []
        self.answered = 0

    async def __call__(self, messages: list[Message], *, max_tokens: int | None = None) -> Any:
        given = sorted(marks(messages))
        size = sum(map(CODEC.estimate, messages))
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append(answer)
        try:
            how = await answer
        finally:
            self.waiting.remove(answer)
        if how == "fail":
            raise RuntimeError("the model failed")
        if how == "garbage":
            return 42
        self.answered += 1
        if how == "empty":
            return " "
        return "".join(f"<{m}>" for m in given) + ("long " * size if how == "long" else "")


@dataclass
class Line:
    """One conversation, as its caller holds it."""

    session: Session
    messages: list[Message]
    rewrite: bool
    #: the last view, and whether the caller has only appended since
    view: list[Message] | None = None
    appended: bool = True
    reloaded: bool = False
    open_calls: list[str] = field(default_factory=list)
    handles: list[LookaheadHandle] = field(default_factory=list)
    #: rewrite mode: the head of a rewritten list, and the marks of what it was rewritten from
    heads: list[tuple[list[Any], set[int]]] = field(default_factory=list)

    def marks(self) -> set[int]:
        """All that belongs to this branch, the raw messages behind a rewritten list included."""
        found = marks(self.messages)
        texts = [m["content"] for m in self.messages]
        return found.union(*(behind for head, behind in self.heads if texts[: len(head)] == head))


class Conversations(RuleBasedStateMachine):
    """One to three conversations on one runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.loop = self.runner.get_loop()
        self.model = Model()
        self.events = Events()
        self.number = itertools.count(1)
        self.ids = itertools.count(1)
        self.lines: list[Line] = []
        self.dead: list[LookaheadHandle] = []

    @initialize(
        commit=st.sampled_from(["ready", "hard_limit", KStepOff(2), BreakEven(Prices(3.0, 0.3, 15.0), turns=40)]),
        idle=st.sampled_from([None, None, 20.0]),
        overrun=st.sampled_from(["promote", "promote", "fallback", "raw"]),
        discard=st.sampled_from([Salvage(), Salvage(ttl=60, max_bytes=2000), Immediate(), Finish()]),
        source=st.sampled_from(["view", "raw"]),
        model_id=st.sampled_from([None, "model"]),
        concurrency=st.integers(1, 2),
        rewrite=st.booleans(),
        system=st.booleans(),
        start=st.integers(0, 10),
        store=st.sampled_from([None, "works", "works", "fail", "hang", "corrupt"]),
        entry=st.sampled_from([None, 150]),
    )
    def begin(
        self,
        commit: Any,
        idle: float | None,
        overrun: str,
        discard: Any,
        source: str,
        model_id: str | None,
        concurrency: int,
        rewrite: bool,
        system: bool,
        start: int,
        store: str | None,
        entry: int | None,
    ) -> None:
        self.store = None if store is None else FlakyStore(mode=None if store == "works" else store)
        self.runtime = Runtime(
            clock=self.loop.time, on_event=self.events, store=self.store, concurrency=concurrency, max_pending=3
        )
        self.runner.run(self.runtime.__aenter__())
        self.policy = Policy(
            Summarize(
                self.model, keep=("messages", 3), facts=False, max_tokens=400, window=100_000,
                source=source, model_id=model_id,
            ),
            context_window=WINDOW, trigger=("fraction", 0.5), land_at=("fraction", 0.3), commit=commit,
            overrun=overrun, discard=discard, max_wait=MAX_WAIT, fallback=KeepRecent(("messages", 3)),
            max_message_tokens=entry, idle=idle,
        )  # fmt: skip
        session = self.runtime.session("s0", policy=self.policy)
        messages = [S()] if system else []
        for _ in range(start):
            messages += [H(self.mark(), size=60), A(self.mark(), size=60)]
        self.lines.append(Line(session, messages, rewrite))

    # -- what the agent does -------------------------------------------------------------------------------------

    def line(self, which: int) -> Line:
        return self.lines[which % len(self.lines)]

    def mark(self) -> str:
        return f"<{next(self.number)}>"

    def append(self, line: Line, message: Message) -> None:
        if line.messages and CODEC.in_progress(line.messages[-1]):
            line.messages[-1].pop("status")  # it came to its end
        line.messages.append(message)

    @rule(
        which=st.integers(0, 2),
        turns=st.integers(2, 6),
        size=st.integers(30, 90),
        tools=st.integers(0, 3),
        how=st.sampled_from(["answer", "answer", "answer", None, "fail"]),
    )
    def turns(self, which: int, turns: int, size: int, tools: int, how: str | None) -> None:
        """Whole turns: a question, perhaps parallel tools, an answer; the model ends (or not) between them."""
        line = self.line(which)
        for _ in range(turns):
            self.append(line, H(self.mark(), size=size))
            if tools:
                ids = [f"c{next(self.ids)}" for _ in range(tools)]
                self.commit(line)
                self.append(line, A(self.mark(), *ids, size=size))
                for i in reversed(ids):
                    self.append(line, T(i, self.mark(), size=size))
            self.commit(line)
            self.append(line, A(self.mark(), size=size))
            self.observe(line)
            if how is not None:
                self.runner.run(self.pass_time(0))
                self.end_all(how)
                self.runner.run(self.pass_time(1))

    @rule(
        which=st.integers(0, 2),
        what=st.sampled_from(["user", "assistant", "thinking", "calls", "again", "result", "orphan", "half", "more"]),
        size=st.sampled_from([5, 50, 200, 400]),
        pick=st.integers(0, 5),
    )
    def one_message(self, which: int, what: str, size: int, pick: int) -> None:
        """One message of any kind. A result is of some call that is still open: at once, partial, or late."""
        line = self.line(which)
        if what == "user":
            self.append(line, H(self.mark(), size=size))
        elif what == "assistant":
            self.append(line, A(self.mark(), size=size))
        elif what == "thinking":
            self.append(line, A(self.mark(), size=size, reasoning_content="hm"))
        elif what in ("calls", "again"):
            ids = ["again"] if what == "again" else [f"c{next(self.ids)}" for _ in range(1 + pick % 3)]
            self.append(line, A(self.mark(), *ids, size=20))
            line.open_calls += ids
        elif what == "result" and line.open_calls:
            self.append(line, T(line.open_calls.pop(pick % len(line.open_calls)), self.mark(), size=size))
        elif what == "orphan":
            self.append(line, T("nobody", self.mark(), size=10))
        elif what == "half":
            self.append(line, A(self.mark(), status="in_progress", size=15))
        elif what == "more" and line.messages and CODEC.in_progress(line.messages[-1]):
            line.messages[-1]["content"] += " more"
            line.appended = False

    # -- what the caller does to its list --------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 2),
        how=st.sampled_from(
            ["edit", "edit", "replace", "delete", "truncate", "regenerate", "insert", "clear", "empty"]
        ),
        where=st.integers(0, 200),
    )
    def disturb(self, which: int, how: str, where: int) -> None:
        """Edits in place or by replacement, deletions, truncations, another answer, an emptied list."""
        line = self.line(which)
        messages = line.messages
        k = where % len(messages) if messages else 0
        if how == "clear":
            line.messages = [m for m in messages[:1] if m["role"] == "system"]
        elif how == "empty":
            line.messages = []
        elif not messages or CODEC.summary_text(messages[k]) is not None:
            return
        elif how == "edit":
            messages[k]["content"] = f"{self.mark()} edited"
        elif how == "replace":
            messages[k] = {**messages[k], "content": f"{self.mark()} replaced"}
        elif how == "delete":
            del messages[k]
        elif how == "insert":
            messages.insert(k, H(self.mark(), size=20))
        elif how == "truncate":
            del messages[-(1 + where % 8) :]
        elif how == "regenerate" and messages[-1]["role"] == "assistant":
            messages[-1] = A(self.mark(), size=20)
        line.appended = False

    @rule(which=st.integers(0, 2))
    def reload(self, which: int) -> None:
        """The messages come back as equal copies, with other bookkeeping."""
        line = self.line(which)
        line.messages = [{**copy.deepcopy(m), "id": f"id{next(self.ids)}"} for m in line.messages]
        line.reloaded = True

    @rule(which=st.integers(0, 2), where=st.integers(0, 200), rewrite=st.booleans(), whole=st.booleans())
    def fork(self, which: int, where: int, rewrite: bool, whole: bool) -> None:
        """Another conversation that shares a prefix; with three of them, one is closed and opened again."""
        line = self.line(which)
        if len(self.lines) < 3:
            session = line.session.fork(f"s{next(self.ids)}")
            messages = copy.deepcopy(line.messages[: None if whole else where % (len(line.messages) + 1)])
            fork = Line(session, messages, rewrite, open_calls=list(line.open_calls), heads=list(line.heads))
            self.lines.append(fork)
            return
        self.runner.run(line.session.close())
        self.dead += line.handles
        line.handles = []
        line.session = self.runtime.session(line.session.id, policy=self.policy)
        line.view = None

    # -- the session -------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 2), commit=st.booleans())
    def boundary(self, which: int, commit: bool) -> None:
        """A turn or segment boundary."""
        (self.commit if commit else self.observe)(self.line(which))

    def observe(self, line: Line) -> None:
        before = copy.deepcopy(line.messages)
        handle = line.session.observe(line.messages)
        if handle is not None:
            self.hold(line, handle)
        assert line.messages == before

    def hold(self, line: Line, handle: LookaheadHandle) -> None:
        if handle not in line.handles:
            line.handles.append(handle)

    def commit(self, line: Line) -> None:
        raw = list(line.messages)
        before = copy.deepcopy(raw)
        receipts = len(line.session.receipts)
        began, first = self.loop.time(), line.session._first_commit
        view = self.runner.run(line.session.commit(line.messages))
        waited = self.loop.time() - began
        assert same_objects(line.messages, raw) and raw == before, "the caller's messages were changed"
        new = list(line.session.receipts)[receipts:]
        tokens = sum(map(CODEC.estimate, view))
        if first and self.store is not None:
            waited -= STORE_WAIT
        if waited > 1e-6:
            assert waited <= MAX_WAIT + 1e-6
            assert tokens > LIMIT or any(r.tokens_before > LIMIT for r in new), "waited below the hard limit"
        half = CODEC.estimate(raw[-1]) if raw and CODEC.in_progress(raw[-1]) else 0
        assert line.session.branch.tokens == tokens - half, "the session counts another view"
        if self.policy.overrun != "raw" and tokens - half > LIMIT:
            assert self.events.of("view.oversized"), "the view does not fit"
        self.check(line, view, rewritten=bool(new))

    def check(self, line: Line, view: list[Message], *, rewritten: bool) -> None:
        messages = line.messages
        shown = {id(m) for m in view}
        stale = marks(view) - line.marks()
        assert not stale, f"stale: {sorted(stale)}"
        dropped = {
            i
            for a in line.session.branch.applied
            if a.artifact.transform == "keep_recent"
            for e in a.edits
            for i in range(e.start, e.end)
        }
        covered = marks(view)
        for i, m in enumerate(messages):
            assert id(m) in shown or i in dropped or marks([m]) <= covered, f"message {i} is lost"
        held = {id(m) for m in messages}
        kept = [m for m in view if id(m) in held]
        assert same_objects(kept, [m for m in messages if id(m) in shown]), "reordered"
        lead = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        assert same_objects(view[:lead], messages[:lead]), "system messages do not stay first"
        assert len(problems(view)) <= len(problems(messages)), (problems(view), problems(messages))
        if line.view is not None and line.appended and not rewritten:
            head = view[: len(line.view)]
            assert head == line.view or line.reloaded, "the view changed without a commit"
            assert line.reloaded or same_objects(head, line.view)
        edits = line.session.branch.edits
        if line.rewrite and edits:
            end = edits[-1].end
            length = end + sum(len(e.messages) - (e.end - e.start) for e in edits)
            line.heads.append(([m["content"] for m in view[:length]], line.marks()))
            line.messages = list(view)
        line.view, line.appended, line.reloaded = view, True, False

    @rule(which=st.integers(0, 2), first=st.integers(0, 30), count=st.integers(0, 8))
    def schedule(self, which: int, first: int, count: int) -> None:
        line = self.line(which)
        target = list(range(first, first + count)) if count else None
        try:
            self.hold(line, line.session.schedule_transform("summarize", line.messages, target_segments=target))
        except ConfigurationError:
            pass

    @rule(which=st.integers(0, 2), pick=st.integers(0, 9), action=st.sampled_from(["discard", "promote", "commit"]))
    def use_handle(self, which: int, pick: int, action: str) -> None:
        line = self.line(which)
        if not line.handles:
            return
        handle = line.handles[pick % len(line.handles)]
        if action == "discard":
            handle.discard()
            assert handle.state in (HandleState.DISCARDED, HandleState.COMMITTED, HandleState.FAILED)
        elif action == "promote":
            handle.promote()
        else:
            before = len(line.session.receipts)
            try:
                view = handle.commit(line.messages)
            except HandleError:
                return
            self.check(line, view, rewritten=len(line.session.receipts) > before)

    # -- what the model does -----------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(["answer", "answer", "answer", "fail", "garbage", "empty", "long"]))
    def model_ends(self, how: str) -> None:
        """The calls under way end; without it, they hang."""
        self.runner.run(self.pass_time(0))
        self.end_all(how)
        self.runner.run(self.pass_time(0))

    def end_all(self, how: str) -> None:
        for answer in self.model.waiting:
            if not answer.done():
                answer.set_result(how)

    @rule(seconds=st.sampled_from([0, 1, 40, 400, 2000]))
    def wait(self, seconds: int) -> None:
        self.runner.run(self.pass_time(seconds))

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        for _ in range(10):
            await asyncio.sleep(0)

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def bounded(self) -> None:
        if not self.lines:
            return
        for line in self.lines:
            session = line.session
            assert len(session._shelf.artifacts) <= MAX_ARTIFACTS + len(session.branch.applied) + 1
            assert len(session._handles.explicit) <= MAX_ARTIFACTS + 1
            assert len(session.receipts) <= 1000
            edits = session.branch.edits
            assert all(a.end <= b.start for a, b in itertools.pairwise(edits)), "edits overlap"
        pool = self.runtime._pool
        statistics = pool.statistics()
        assert statistics.queued <= 3 + 1
        # what was asked for while the loop stood still waits in the inbox
        assert len(self.runtime.flights.listed) <= statistics.queued + statistics.running + len(pool._inbox) + 1

    @invariant()
    def truthful(self) -> None:
        if not self.lines:
            return
        c = self.runtime.counters
        live = sum(len(line.session._handles.all()) + len(line.session._handles.finishing) for line in self.lines)
        assert c.started == c.committed + c.stale_total + c.failed + live, (c, live)
        assert c.wasted_tokens <= c.usage.total_tokens
        assert not self.events.of("error"), [e.data for e in self.events.of("error")]

    def teardown(self) -> None:
        try:
            if not self.lines:
                return
            self.runner.run(self.runtime.aclose())
            c = self.runtime.counters
            assert c.started == c.committed + c.stale_total + c.failed, c
            assert c.usage.calls == self.model.answered, (c, self.model.answered)
            handles = [h for line in self.lines for h in line.handles] + self.dead
            assert all(h.done() and h.state is not HandleState.READY for h in handles)
            assert all(h.reason in Reason for h in handles if h.state is not HandleState.COMMITTED)
            assert not self.runtime.flights.listed
            assert asyncio.all_tasks(self.loop) == set()
        finally:
            self.runner.close()


TestConversations = Conversations.TestCase
TestConversations.settings = machine_settings(examples=30, steps=40)

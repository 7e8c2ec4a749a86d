"""The locality checker: does a transform depend on nothing but what its locality allows?"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..codec import Codec, OpenAIMessages, results_of, with_results
from ..cuts import Run, kept_inside, request_for, safe_end
from ..errors import ConfigurationError
from ..history import History
from ..segments import segments
from ..stores import MemoryStore
from ..transforms.base import Locality, Transform, TransformRequest
from ..view import Edit, Unit, align

#: what one application came to: edits relative to the run, as the model sees them, or the type of the error
Result = tuple[tuple[int, int, tuple[bytes, ...]], ...] | str
Group = Sequence[Any]

_WORDS = "the build was slow again so we moved parser cache tests to another branch and waited for review".split()
_TIMEOUT_S = 300.0
#: draws for each run to compare: some have nothing to rewrite, or nothing that may stand behind them
_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalityReport:
    """What :func:`check_locality` did. ``runs`` were compared; in ``changed`` of them the transform rewrote
    something, and in ``failed`` it raised, alike both times."""

    transform: str
    locality: Locality
    runs: int
    changed: int
    failed: int


@dataclass(frozen=True, slots=True)
class _Case:
    """One run ``[start, end)`` of the first ``length`` messages; an earlier summary stands for ``[start, summary)``."""

    length: int
    start: int
    end: int
    summary: int | None


async def check_locality(
    transform: Transform,
    *,
    codec: Codec | None = None,
    messages: list[Any] | None = None,
    runs: int = 50,
    seed: int = 0,
) -> LocalityReport:
    """Check that what a transform makes of a run depends on nothing that its locality excludes.

    The transform is applied to random runs of ``messages``, on requests as the core builds them, once as they are
    and once with random messages behind the run and, for ``SEGMENT``, random messages before it too. Its edits have
    to be the same. A ``FUTURE`` transform may depend on anything: nothing is run.

    While the transform runs, the list ``messages`` itself holds what was added, as the caller's list does in a live
    session; so a transform is found out too that reads it through a reference of its own. Afterwards the list is as
    it was. A transform that asks a model needs one here that answers the same question alike.

    Args:
        transform: any transform.
        codec: the messages' codec.
        messages: a history of at least three segments, on which the transform has something to do; by default one of
            our own with tool calls and a few long results. Needed with a codec of your own.
        runs: how many runs to compare.
        seed: what the choice depends on: the same seed checks the same.

    Raises:
        AssertionError: with the smallest difference found; also when the transform gives two results for one
            request, changes the messages that it is given, or fails every time.
        ConfigurationError: naming option, value and what is allowed.
    """
    if not isinstance(transform, Transform):
        raise ConfigurationError(f"transform={transform!r}: expected an object with name, locality, fingerprint, apply")
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise ConfigurationError(f"runs={runs!r}: expected a whole number of at least 1")
    if messages is None and codec is not None and not isinstance(codec, OpenAIMessages):
        raise ConfigurationError(f"messages=None: a history is needed with the codec {codec.name!r}")
    held = messages if isinstance(messages, list) else list(messages) if messages is not None else _history()
    checker = _Checker(transform, codec or OpenAIMessages(), held, random.Random(seed))
    if transform.locality is Locality.FUTURE:
        return checker.report()
    original = list(held)
    try:
        await checker.compare(runs)
    finally:
        held[:] = original
    return checker.report()


class _Checker:
    def __init__(self, transform: Transform, codec: Codec, held: list[Any], rng: random.Random) -> None:
        self._transform, self._codec, self._held, self._rng = transform, codec, held, rng
        self._original = list(held)
        self._segments = segments(held, codec)
        self._groups = [held[s.start : s.end] for s in self._segments if s.kind not in ("system", "orphan")]
        if len(self._segments) < 3:
            raise ConfigurationError(f"messages: {len(self._segments)} segments; expected at least 3")
        self._runs = self._changed = self._failed = 0
        self._error: Exception | None = None

    def report(self) -> LocalityReport:
        if self._runs and self._failed == self._runs:
            raise AssertionError(f"{self._transform.name}: every one of {self._runs} runs failed") from self._error
        return LocalityReport(
            transform=self._transform.name,
            locality=self._transform.locality,
            runs=self._runs,
            changed=self._changed,
            failed=self._failed,
        )

    async def compare(self, runs: int) -> None:
        """Compare that many runs."""
        for _ in range(_TRIES * runs):
            if self._runs == runs:
                return
            await self._once()
        if self._runs < runs:
            raise ConfigurationError(f"messages: only {self._runs} runs in {_TRIES * runs} could be compared")

    async def _once(self) -> None:
        """Draw a run and what to add, and compare."""
        case = self._draw()
        before: list[Group] = []
        if self._transform.locality is Locality.SEGMENT:
            before = [self._group() for _ in range(self._rng.randint(0, 3))]
            before.insert(0, [self._codec.system(self._text())])
        after = [g for g in (self._group() for _ in range(self._rng.randint(1, 4))) if self._allowed(case, g)]
        if not (before or after) or self._nothing_to_rewrite(case):
            return
        plain = await self._apply(case, [], [])
        other = await self._apply(case, before, after)
        self._runs += 1
        self._failed += isinstance(plain, str)
        self._changed += bool(plain) and not isinstance(plain, str)
        if plain == other:
            return
        if await self._apply(case, [], []) != plain:
            raise AssertionError(
                f"{self._transform.name}: two applications to the same request differ. It keeps something between "
                "calls, or its model answers differently each time"
            )
        before, after, other = await self._shrink(case, plain, before, after, other)
        raise AssertionError(self._difference(case, plain, other, before, after))

    async def _shrink(
        self, case: _Case, plain: Result, before: list[Group], after: list[Group], other: Result
    ) -> tuple[list[Group], list[Group], Result]:
        """Leave out what the difference does not need."""
        again = True
        while again:
            again = False
            for part in (before, after):
                for k in range(len(part)):
                    left = part[:k] + part[k + 1 :]
                    fewer = (left, after) if part is before else (before, left)
                    if (result := await self._apply(case, *fewer)) != plain:
                        (before, after), other, again = fewer, result, True
                        break
                if again:
                    break
        return before, after, other

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> _Case:
        segs, rng = self._segments, self._rng
        first = 0 if rng.random() < 0.5 else rng.randrange(len(segs) - 1)
        last = rng.randrange(first, len(segs) - 1)
        tail = rng.randrange(last + 1, len(segs))
        history = self._read(self._original[: segs[tail].end])
        end = min(segs[last].end, safe_end(history))
        if end <= segs[first].start:  # an open call pins everything from it on
            first, end = 0, segs[0].end
        inside = [s.start for s in segs if segs[first].start < s.start < end]
        summary = rng.choice(inside) if inside and rng.random() < 0.3 else None
        return _Case(segs[tail].end, segs[first].start, end, summary)

    def _nothing_to_rewrite(self, case: _Case) -> bool:
        history = self._read(self._original[: case.length])
        return len(kept_inside(history, case.start, case.end)) == case.end - case.start

    def _allowed(self, case: _Case, group: Group) -> bool:
        """The newest user message stays word for word: where it lies in the run, a newer one makes another run."""
        history = self._read(self._original[: case.length])
        return history.last_user >= case.end or all(self._codec.role(m) != "user" for m in group)

    def _group(self) -> Group:
        return [self._reworded(m) for m in self._rng.choice(self._groups)]

    def _reworded(self, message: Any) -> Any:
        codec = self._codec
        if codec.role(message) != "tool":
            return codec.with_text(message, self._text())
        parts = [codec.with_text(part, self._text()) for part in results_of(codec, message)]
        return with_results(codec, message, parts)

    def _text(self) -> str:
        return " ".join(self._rng.choices(_WORDS, k=self._rng.randint(1, 40)))

    def _read(self, messages: list[Any]) -> History:
        history = History(self._codec)
        history.sync(messages)
        return history

    # -- applying ----------------------------------------------------------------------------------------------------

    async def _apply(self, case: _Case, before: Sequence[Group], after: Sequence[Group]) -> Result:
        """The result for this run, with these messages in the history before and behind it."""
        codec, transform, held = self._codec, self._transform, self._held
        lead = self._segments[0].start
        added = [m for group in before for m in group]
        held[:] = [
            *self._original[:lead],
            *added,
            *self._original[lead : case.length],
            *(m for group in after for m in group),
        ]
        history = self._read(held)
        start, end = case.start + len(added), case.end + len(added)
        run = Run(start, end, kept_inside(history, start, end))
        edits: tuple[Edit, ...] = ()
        if case.summary is not None and getattr(transform, "source", "view") == "view":
            mine = (codec.summary("what was done before"),)
            edits = (Edit(start=start, end=case.summary + len(added), messages=mine, tokens=history.count(mine)),)
        pieces, request = self._request(held, edits, run, len(after))
        frozen = [codec.freeze(m) for m in held]
        try:
            rewrite = await transform.apply(request)
            if rewrite.opening:
                result: Result = ((0, 0, self._visible(rewrite.messages)),)
            else:
                made = align(pieces, run.kept, rewrite.messages, history.count)
                result = tuple(
                    (e.start - start, e.end - start, self._visible(e.messages)) for e in made if e not in edits
                )
        except Exception as error:
            self._error = error
            result = type(error).__name__
        if not codec.same(held, frozen):
            raise AssertionError(f"{transform.name}: it changed the messages that it was given")
        return result

    def _request(
        self, held: list[Any], edits: Sequence[Edit], run: Run, later: int
    ) -> tuple[list[Unit], TransformRequest]:
        """As the core builds it."""
        return request_for(
            held,
            run,
            self._codec,
            edits=edits,
            before=(),
            deadline=asyncio.get_running_loop().time() + _TIMEOUT_S,
            session_id=f"locality-{later}",
            store=MemoryStore(clock=lambda: 0.0),
            context_tokens=32_000,
        )

    def _visible(self, messages: Sequence[Any]) -> tuple[bytes, ...]:
        return tuple(map(self._codec.visible, messages))

    # -- saying ------------------------------------------------------------------------------------------------------

    def _difference(
        self, case: _Case, plain: Result, other: Result, before: Sequence[Group], after: Sequence[Group]
    ) -> str:
        name, locality = self._transform.name, self._transform.locality
        counts = [(sum(map(len, before)), "before"), (sum(map(len, after)), "behind")]
        added = " and ".join(f"{n} message{'s' * (n > 1)} {where} it" for n, where in counts if n)
        lines = [
            f"{name} declares {locality.value} locality, but its result for messages [{case.start}, {case.end}) "
            f"changed with {added}:",
            *(f"  added {self._codec.role(m)}: {_short(self._codec.text(m))}" for g in (*before, *after) for m in g),
            *_compare(plain, other),
        ]
        return "\n".join(lines)


def _compare(plain: Result, other: Result) -> list[str]:
    """The first edit that differs, from a little before the first difference in it."""
    if isinstance(plain, str) or isinstance(other, str):
        shown = [f"it raised {r}" if isinstance(r, str) else f"{len(r)} edits" for r in (plain, other)]
        return [f"  without: {shown[0]}", f"  with:    {shown[1]}"]
    k = len(_common(plain, other))
    texts = [_edit(plain, k), _edit(other, k)]
    cut = max(0, len(_common(*(t[1] for t in texts))) - 40)
    shown = [place + (_short("..." * (cut > 0) + text[cut:]) if text else "") for place, text in texts]
    return [f"  without: {shown[0]}", f"  with:    {shown[1]}"]


def _common(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
    """What both begin with."""
    n = next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:n]


def _edit(edits: Sequence[tuple[int, int, tuple[bytes, ...]]], k: int) -> tuple[str, str]:
    if k >= len(edits):
        return "no further edit", ""
    start, end, messages = edits[k]
    text = "\n".join(m.decode("utf-8", "replace") for m in messages)
    return f"edit {k} of [{start}, {end}) of the run: {'' if messages else 'removed'}", text


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:117]}...")


def _history() -> list[Any]:
    """Six turns with tool calls, some of their results long."""
    rng = random.Random(7)
    messages: list[Any] = [{"role": "system", "content": "You are an agent."}]
    for turn in range(6):
        ids = [f"call-{turn}-{k}" for k in range(1 + turn % 2)]
        calls = [{"id": i, "type": "function", "function": {"name": "run", "arguments": '{"x": 1}'}} for i in ids]
        messages.append({"role": "user", "content": f"question {turn}: {' '.join(rng.choices(_WORDS, k=20))}"})
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        for k, call_id in enumerate(ids):
            words = rng.choices(_WORDS, k=1500 if k == 0 else 30)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": " ".join(words)})
        messages.append({"role": "assistant", "content": f"answer {turn}: {' '.join(rng.choices(_WORDS, k=20))}"})
    return messages

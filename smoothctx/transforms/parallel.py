"""ParallelSummarize: a summary for each block of the conversation, written side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import anyio

from ..blocks import Block, cut, share
from ..errors import ConfigurationError, InvalidOutput, TransformError
from ..segments import segment
from ..tokens import MESSAGE_TOKENS, count_text
from ..usage import Usage
from . import facts as durable
from .base import Locality, Rewrite, Size, TransformRequest, check_size, fingerprint
from .inputs import InputUnit, fence, head, opens_with_user, pieces, transcript, units
from .model import Model, ModelReply, options_tokens
from .prompts import PART, missing
from .prompts_blocks import DETAILS, TARGET, instruction, merging
from .replies import clean, was_cut
from .summarize import DEFAULT_WINDOW, MIN_INPUT, OVER_CAP
from .validators import NotSmaller

#: the smallest summary that is worth asking for, in tokens
MIN_SUMMARY = 48
#: tokens of the facts section of one block at most
MAX_FACTS = 300
#: what a summary message has beside the model's text and the facts: its fence and the note in it
FRAME = 48
#: seconds before one block of several is tried again after an error that may pass, and what a server may ask for
PAUSE_S, MAX_PAUSE_S = 0.5, 10.0


class ParallelSummarize:
    """Replaces a run of messages by one summary message for each block of it.

    The volume of what is kept follows from the number of blocks and the detail, not from a wish in a prompt. As a
    policy's transform every block is compacted as soon as it is filled, with a replacement of its own, so that only
    the newest can ever be on the critical path. Each request is the view before the block (which the agent's engine
    has cached, and which each block's request extends) and then the block, last, between ``<TARGET_BLOCK>`` marks.
    A block whose summary fails stays as it is.

    Args:
        model: an engine, or ``async def model(messages, *, max_tokens=None) -> str``.
        block_tokens: size of a block; blocks end between segments.
        detail: how much of a block to keep: ``"concise"``, ``"standard"``, ``"detailed"`` or ``"very_detailed"``.
        total_tokens: cap of all summaries in the view together, shared out by age and kind; the oldest ones are
            merged when it is reached. ``None``: no cap.
        workers: blocks that are summarised at once.
        max_tokens: cap of the model's text for one block, whatever the detail; by default half of ``block_tokens``.
        prompt: replaces the built-in instruction for a block.
        facts: carry paths, ids, URLs, numbers, tool names and live tasks word for word beside the model's text.
            Texts that the user pinned are carried in any case.
        keep: what stays raw at the end of the view.
        model_id: names a plain callable, so that its summaries may be shared and stored.
        window: the summariser's own context window in tokens; by default the engine's, else the agent's.
        fixed_tokens: for benchmarks only: a text that was cut off at ``max_tokens`` is accepted.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    name = "parallel_summarize"
    locality = Locality.PREFIX
    layout = "aligned"
    source = "view"

    def __init__(
        self,
        model: Any,
        *,
        block_tokens: int = 4000,
        detail: str = "concise",
        total_tokens: int | None = None,
        workers: int = 4,
        max_tokens: int | None = None,
        prompt: str | None = None,
        facts: bool = True,
        keep: Size = ("messages", 20),
        model_id: str | None = None,
        window: int | None = None,
        fixed_tokens: bool = False,
    ) -> None:
        self._model = Model(model, model_id=model_id)
        self.keep = check_size("keep", keep)
        _whole("block_tokens", block_tokens, 2 * MIN_SUMMARY)
        if not isinstance(detail, str) or detail not in DETAILS:
            raise ConfigurationError(f"detail={detail!r}: expected one of {', '.join(map(repr, DETAILS))}")
        _whole("workers", workers, 1)
        own = max(MIN_SUMMARY, block_tokens // 2) if max_tokens is None else max_tokens
        _whole("max_tokens", own, 1)
        if total_tokens is not None:
            _whole("total_tokens", total_tokens, 2 * (MIN_SUMMARY + FRAME))
        if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
            raise ConfigurationError(f"prompt={prompt!r}: expected a text that is not empty, or None")
        for option, flag in (("facts", facts), ("fixed_tokens", fixed_tokens)):
            if not isinstance(flag, bool):
                raise ConfigurationError(f"{option}={flag!r}: expected True or False")
        if window is not None:
            _whole("window", window, 1)
            if window <= own + MIN_INPUT:
                raise ConfigurationError(f"window={window!r}: must leave room for input beside max_tokens={own}")
        self.block_tokens, self.detail, self.total_tokens = block_tokens, detail, total_tokens
        self.workers, self.max_tokens, self.prompt, self.facts = workers, own, prompt, facts
        self.window, self.fixed_tokens = window, fixed_tokens
        self.fingerprint = self._fingerprint()

    @property
    def engine(self) -> Any:
        """The engine that writes the summaries; ``None`` for a plain callable."""
        return self._model.engine

    @property
    def model(self) -> Model:
        """The model, ready to be asked."""
        return self._model

    def _fingerprint(self) -> str | None:
        if self._model.identity is None:
            return None
        names = (
            "block_tokens",
            "detail",
            "total_tokens",
            "max_tokens",
            "prompt",
            "facts",
            "keep",
            "window",
            "fixed_tokens",
        )
        told = [
            instruction(self.prompt, detail=self.detail, source_tokens=0, max_tokens=self.max_tokens, strict=False),
            merging(max_tokens=self.max_tokens, strict=False),
        ]
        return fingerprint(
            self.name, {"model": self._model.identity, "told": told, **{name: getattr(self, name) for name in names}}
        )

    @property
    def block_cap(self) -> int:
        """Tokens that the summary message of one block may have in all."""
        cap = self.max_tokens + FRAME + (MAX_FACTS if self.facts else 0)
        return cap if self.total_tokens is None else min(cap, self.total_tokens // 2)

    def shares(self, blocks: Sequence[Block]) -> list[int]:
        """Tokens that the summary message of each of these blocks (all there are, oldest first) may have."""
        if self.total_tokens is None:
            return [self.block_cap] * len(blocks)
        return share(self.total_tokens, blocks, cap=self.block_cap)

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Summarise the run, block by block and ``workers`` at a time; what failed is passed on as it is.

        With ``request.max_tokens`` the run is one block. A run of nothing but summaries is merged into one.

        Raises:
            InvalidOutput: no block has a usable summary, or the only one has not.
            TransformError: there is nothing to summarise, or the summariser's window is too small.
            EngineError: the model server failed, for every block.
        """
        if not request.messages:
            raise TransformError("parallel_summarize: there are no messages to summarise")
        shown = list(request.messages if request.shown is None else request.shown)
        ours = {id(m) for m in request.messages}
        if request.max_tokens is not None:
            jobs = [self._job(request, shown, [], ours, request.max_tokens)]
        elif all(request.codec.summary_text(m) is not None for m in request.messages):
            return Rewrite(messages=list(request.messages))
        else:
            blocks = self._blocks(request, shown)
            older = replace(request, live_tasks=())  # the newest names them
            jobs = [
                self._job(request if b is blocks[-1][0] else older, shown[b.start : b.end], shown[: b.start], ours, cap)
                for b, cap in blocks
            ]
        jobs = [job for job in jobs if job.replaced]
        await self._side_by_side(jobs)
        self._within_total(jobs, request)
        if all(job.text is None for job in jobs):
            raise next((job.error for job in jobs if job.error is not None), _nothing())
        usage = sum((job.usage for job in jobs), Usage())
        messages = [m for job in jobs for m in job.result()]
        return Rewrite(messages=messages, usage=usage, text="\n\n".join(job.text for job in jobs if job.text))

    def _blocks(self, request: TransformRequest, shown: Sequence[Any]) -> list[tuple[Block, int]]:
        """How a larger run is cut, and what each block's summary may cost."""
        codec = request.codec
        found = segment(codec, shown)
        tokens = list(accumulate(map(codec.estimate, shown), initial=0))
        size = self.block_tokens
        if self.total_tokens is not None:  # no more blocks than there are summaries worth asking for
            most = max(1, self.total_tokens // (MIN_SUMMARY + FRAME))
            size = max(size, -(-tokens[-1] // most))
        blocks = cut(found.segments, tokens, size, start=0, end=len(shown))
        if found.lead and blocks:  # system messages at the head of a run
            blocks[0] = Block(0, blocks[0].end, tokens[blocks[0].end], blocks[0].tool_tokens, blocks[0].filled)
        return list(zip(blocks, self.shares(blocks), strict=True))

    def _job(self, request: TransformRequest, shown: list[Any], earlier: list[Any], ours: set[int], cap: int) -> _Job:
        return _Job(self, request, shown, [*request.before, *earlier], [m for m in shown if id(m) in ours], cap)

    async def _side_by_side(self, jobs: Sequence[_Job]) -> None:
        if len(jobs) == 1:
            await jobs[0].run()
            return
        limit = anyio.Semaphore(self.workers)

        async def work(job: _Job) -> None:
            try:
                for again in (True, False):
                    try:
                        return await job.run()
                    except Exception as error:
                        if not (again and getattr(error, "retryable", False)):
                            raise
                        await anyio.sleep(min(MAX_PAUSE_S, getattr(error, "retry_after_s", None) or PAUSE_S))
            except Exception as error:  # it stays with its block
                job.error = error
            finally:
                limit.release()

        async with anyio.create_task_group() as group:
            for job in jobs:  # oldest first: each one's prompt extends the last one's
                await limit.acquire()
                group.start_soon(work, job)

    def _within_total(self, jobs: Sequence[_Job], request: TransformRequest) -> None:
        """A block stays as it is where its summary saves nothing, or would take all of them over the cap."""
        count = request.codec.estimate
        used = 0
        for job in reversed(jobs):
            if job.text is None:
                continue
            size = sum(map(count, job.result()))
            if self.total_tokens is not None and used + size > self.total_tokens:
                job.text, job.error = None, InvalidOutput(f"summary: larger than total_tokens={self.total_tokens}")
                continue
            if len(jobs) > 1 and size >= sum(map(count, job.replaced)):
                job.text, job.error = None, NotSmaller(f"summary: {size} tokens, as many as what it stands for")
                continue
            used += size

    def __repr__(self) -> str:
        return (
            f"ParallelSummarize({self._model.identity or 'model'}, block_tokens={self.block_tokens}, "
            f"detail={self.detail!r})"
        )


@dataclass(slots=True)
class _Job:
    """One block: what is read, what it stands for, what its summary may cost, and what came of it."""

    options: ParallelSummarize
    request: TransformRequest
    shown: list[Any]
    before: list[Any]
    replaced: list[Any]
    cap: int
    text: str | None = None
    section: str = ""
    usage: Usage = field(default_factory=Usage)
    error: Exception | None = None

    async def run(self) -> None:
        """Write the summary.

        Raises:
            InvalidOutput: the model's answer is of no use, also the second time.
            TransformError: the window is too small.
        """
        codec = self.request.codec
        texts = [codec.summary_text(m) for m in self.replaced]
        whole = [t for t in texts if t is not None]
        merge = len(whole) == len(texts)
        source = sum(map(codec.estimate, self.replaced))
        self.section = durable.render(self._facts(source, merge=merge))
        spent = FRAME + count_text(self.section)
        limit = max(MIN_SUMMARY // 2, min(self.options.max_tokens, self.cap - spent))

        def told(strict: bool) -> str:
            lacked = missing(self.request.missed)
            if merge:
                return merging(max_tokens=limit, strict=strict) + lacked
            own = self.options
            text = instruction(own.prompt, detail=own.detail, source_tokens=source, max_tokens=limit, strict=strict)
            return text + lacked

        target = "\n\n".join(map(durable.strip, whole)) if merge else transcript(self.shown, codec)
        room = self._room(limit, told(True))
        if count_text(target) + MESSAGE_TOKENS + 16 <= room:
            self.text = await self._ask(self._before(room - count_text(target)), target, told, limit)
        else:
            self.text = await self._in_parts(target, told, limit, room)

    def result(self) -> list[Any]:
        """What stands for the block: one summary message, or the block itself."""
        if self.text is None:
            return self.replaced
        return [self.request.codec.summary(f"{self.text}\n\n{self.section}" if self.section else self.text)]

    def _facts(self, source: int, *, merge: bool) -> durable.Facts:
        request = self.request
        if not self.options.facts:
            pins = [*durable.message_pins(self.replaced, request.codec), *request.pins]
            return durable.Facts(pins=tuple(dict.fromkeys(pins)))
        most = min(MAX_FACTS, max(32, source // 10), max(16, self.cap // 4))
        return durable.extract(
            self.replaced, request.codec, pins=request.pins, live_tasks=request.live_tasks, max_tokens=most
        )

    def _room(self, limit: int, told: str) -> int:
        """Tokens of input that fit the summariser's window beside the instruction and the answer."""
        own = self.options
        window = own.window or own.model.window or self.request.context_tokens or DEFAULT_WINDOW
        spent = limit + count_text(told) + 4 * MESSAGE_TOKENS + 32 + options_tokens(self._request_options())
        if window - spent < MIN_INPUT:
            raise TransformError(
                f"parallel_summarize: the summariser's window of {window} tokens leaves {window - spent} for input "
                f"beside the instruction, the tools and {limit} tokens of output"
            )
        return window - spent

    def _before(self, room: int) -> list[dict[str, Any]]:
        """The view before the block as chat messages, without its oldest part where it does not fit.

        What is left out grows in steps of half the room, so that one block's prompt goes on extending the last one's.
        """
        found = units(self.before, self.request.codec)
        excess = sum(u.tokens for u in found) - room
        if excess > 0:
            lead = _system(found)
            dropped, step = 0, max(1, room // 2)
            wanted = -(-excess // step) * step
            rest = found[len(lead) :]
            while rest and dropped < wanted:
                dropped += rest.pop(0).tokens
            found = [*lead, *rest] if sum(u.tokens for u in [*lead, *rest]) <= room else []
        return [m for u in found for m in u.messages]

    async def _in_parts(self, target: str, told: Callable[[bool], str], limit: int, room: int) -> str:
        """A block that is larger than the window: part by part, each with what was written of the ones before."""
        carried_tokens = min(limit, room // 2)
        free = room - carried_tokens - count_text(PART) - 64
        if free < MIN_INPUT // 2:
            raise TransformError(f"parallel_summarize: {room} tokens of input are too few to summarise in parts")
        running: str | None = None
        codec = self.request.codec
        for number, part in enumerate(pieces(target, free), 1):
            if running is not None:  # inside the marks, since its record is to be merged
                record = codec.text(codec.summary(head(running, carried_tokens)))
                part = f"{PART.format(number=number)}\n{record}\n{part}"
            running = await self._ask([], part, told, limit)
        assert running is not None
        return running

    async def _ask(self, before: list[dict[str, Any]], target: str, told: Callable[[bool], str], limit: int) -> str:
        """One text, asked for a second time if the first was cut off, too long, or of no use."""
        strict, failed = False, InvalidOutput("summary: there was no answer")
        for _ in range(2):
            last = {"role": "user", "content": f"{fence(target, TARGET)}\n\n{told(strict)}"}
            reply = await self.options.model.ask(
                opens_with_user([*before, last]), max_tokens=limit, options=self._request_options()
            )
            self.usage += reply.usage
            if self.request.on_usage is not None:
                self.request.on_usage(reply.usage)
            try:
                text = clean(reply)
            except InvalidOutput as error:
                failed = error
                continue
            if self.options.fixed_tokens or not _too_long(reply, text, limit):
                return text
            strict = True
            failed = InvalidOutput(f"summary: cut off at max_tokens={limit}, also when asked for a shorter text")
        raise failed

    def _request_options(self) -> Mapping[str, Any]:
        """What makes the request reuse the agent's prefix; tools are shown for that alone."""
        if not self.options.model.is_engine:
            return {}
        options = dict(self.request.options)
        if options.get("tools"):
            options["tool_choice"] = "none"
        return options


def _system(found: Sequence[InputUnit]) -> list[InputUnit]:
    lead = next(
        (k for k, u in enumerate(found) if u.messages[0].get("role") not in ("system", "developer")), len(found)
    )
    return list(found[:lead])


def _too_long(reply: ModelReply, text: str, limit: int) -> bool:
    return was_cut(reply) or count_text(text) > OVER_CAP * limit + MIN_INPUT


def _nothing() -> TransformError:
    return TransformError("parallel_summarize: there are no messages to summarise")


def _whole(option: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{option}={value!r}: expected a whole number of at least {least}")

"""ParallelSummarize: a summary for each block of the conversation, written side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import anyio

from ..blocks import Block, cut, share
from ..errors import ConfigurationError, InvalidOutput, TransformError
from ..segments import segment
from ..tokens import count_text
from ..usage import Usage
from . import facts as durable
from .base import Locality, Rewrite, Size, TransformRequest, check_size, fingerprint
from .model import Model
from .parallel_block import FRAME, MAX_FACTS, MIN_SUMMARY, BlockJob, always, facts_of, half
from .prompts_blocks import DETAILS, instruction, merging
from .summarize import MIN_INPUT
from .validators import NotSmaller

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
        facts: carry paths, ids, decisions, URLs, numbers, tool names and live tasks word for word beside the model's
            text, also when summaries are merged. Texts that the user pinned are carried in any case.
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

    def merged_tokens(self, summaries: Sequence[str]) -> int:
        """Tokens that one summary instead of these needs: half of what they say, and all that is carried."""
        return FRAME + half(summaries) + always(summaries) + durable.size(durable.carried(summaries))

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
        elsewhere: tuple[str, ...] = ()  # pins that stand in no block: one of them carries them
        if request.max_tokens is not None:
            jobs = [self._job(request, shown, [], ours, request.max_tokens)]
        elif all(request.codec.summary_text(m) is not None for m in request.messages):
            return Rewrite(messages=list(request.messages))
        else:
            blocks = self._blocks(request, shown)
            texts = [list(map(request.codec.text, shown[b.start : b.end])) for b, _ in blocks]
            pins = [tuple(p for p in request.pins if any(p in text for text in own)) for own in texts]
            elsewhere = tuple(p for p in request.pins if not any(p in own for own in pins))
            newest = len(blocks) - 1  # it names the live tasks
            jobs = [
                self._job(
                    replace(request, pins=pins[k], live_tasks=request.live_tasks if k == newest else ()),
                    shown[b.start : b.end],
                    shown[: b.start],
                    ours,
                    cap,
                )
                for k, (b, cap) in enumerate(blocks)
            ]
        jobs = [job for job in jobs if job.replaced]
        await self._side_by_side(jobs)
        self._within_total(jobs, request, count_text("".join(elsewhere)))
        if elsewhere and (first := next((job for job in jobs if job.text is not None), None)) is not None:
            first.carry(elsewhere)
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
        return list(zip(blocks, self._by_need(blocks, request, shown), strict=True))

    def _by_need(self, blocks: Sequence[Block], request: TransformRequest, shown: Sequence[Any]) -> list[int]:
        """Shares of the total: first for the facts that each block has, up to a third in all, then by age and kind."""
        total = self.total_tokens
        if total is None or not self.facts:
            return self.shares(blocks)
        needs = [
            durable.size(durable.extract(shown[b.start : b.end], request.codec, max_tokens=facts_of(b.tokens)))
            for b in blocks
        ]
        most = total // 3
        if (wanted := sum(needs)) > most:
            needs = [need * most // wanted for need in needs]
        texts = share(total - sum(needs), blocks, cap=self.max_tokens + FRAME)
        return [min(self.block_cap, need + text) for need, text in zip(needs, texts, strict=True)]

    def _job(
        self, request: TransformRequest, shown: list[Any], earlier: list[Any], ours: set[int], cap: int
    ) -> BlockJob:
        return BlockJob(self, request, shown, [*request.before, *earlier], [m for m in shown if id(m) in ours], cap)

    async def _side_by_side(self, jobs: Sequence[BlockJob]) -> None:
        if len(jobs) == 1:
            await jobs[0].run()
            return
        limit = anyio.Semaphore(self.workers)

        async def work(job: BlockJob) -> None:
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

    def _within_total(self, jobs: Sequence[BlockJob], request: TransformRequest, used: int) -> None:
        """A block stays as it is where its summary saves nothing, or would take all of them over the cap."""
        count = request.codec.estimate
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


def _nothing() -> TransformError:
    return TransformError("parallel_summarize: there are no messages to summarise")


def _whole(option: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{option}={value!r}: expected a whole number of at least {least}")

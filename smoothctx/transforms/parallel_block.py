"""One block of ``ParallelSummarize``: what is read, what is asked, and what its summary may cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidOutput, TransformError
from ..tokens import MESSAGE_TOKENS, count_text
from ..usage import Usage
from . import facts as durable
from .base import TransformRequest
from .inputs import InputUnit, fence, head, opens_with_user, pieces, transcript, units
from .model import ModelReply, estimate, options_tokens
from .prompts import PART, missing
from .prompts_blocks import TARGET, instruction, merging
from .replies import clean, was_cut
from .summarize import DEFAULT_WINDOW, MIN_INPUT, OVER_CAP

if TYPE_CHECKING:
    from .parallel import ParallelSummarize

#: the smallest summary that is worth asking for, in tokens
MIN_SUMMARY = 48
#: tokens of the facts of one block at most; of a small block, a part of it, but `LEAST_FACTS` in any case
MAX_FACTS, LEAST_FACTS, FACTS_PART = 300, 64, 6
#: what a summary message has beside the model's text and the facts: its fence and the note in it
FRAME = 48


@dataclass(slots=True)
class BlockJob:
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
        merge = bool(whole) and all(map(self._ours, self.replaced))
        source = sum(map(codec.estimate, self.replaced))
        self.section = durable.render(self._facts(source, merge=merge))
        spent = FRAME + count_text(self.section)
        limit = min(self.options.max_tokens, self.cap - spent)
        if merge:  # what is said shrinks, the facts are carried
            limit = min(limit, half(whole))
        limit = max(MIN_SUMMARY // 2, limit)

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

    def carry(self, pins: Sequence[str]) -> None:
        """Carry these texts too, word for word."""
        facts = durable.parse(f"\n{self.section}")
        self.section = durable.render(replace(facts, pins=tuple(dict.fromkeys([*facts.pins, *pins]))))

    def _ours(self, message: Any) -> bool:
        """Is it a summary, or a note of pinned texts?"""
        codec = self.request.codec
        if codec.summary_text(message) is not None:
            return True
        rest = codec.text(message)
        marks = durable.pinned(rest)
        for text in marks:
            rest = rest.replace(durable.PIN_OPEN + text + durable.PIN_CLOSE, "", 1)
        return bool(marks) and codec.role(message) == "user" and not rest.strip()

    def _facts(self, source: int, *, merge: bool) -> durable.Facts:
        request = self.request
        if not self.options.facts:
            pins = [*durable.message_pins(self.replaced, request.codec), *request.pins]
            return durable.Facts(pins=tuple(dict.fromkeys(pins)))
        codec = request.codec
        carried = [t for t in map(codec.summary_text, self.replaced) if t is not None]
        if merge:
            least = min(MIN_SUMMARY, half(carried))
            most = self.cap - FRAME - least - always(carried)
        else:  # what is carried, and what the rest of the block has
            raw = source - sum(count_text(t) for t in carried)
            most = durable.size(durable.carried(carried)) + min(facts_of(raw), (self.cap - FRAME) // 2)
        most = max(16, min(durable.MAX_TOKENS, most))
        return durable.extract(
            self.replaced, request.codec, pins=request.pins, live_tasks=request.live_tasks, max_tokens=most
        )

    def _room(self, limit: int, told: str) -> int:
        """Tokens of input that fit the summariser's window beside the instruction and the answer."""
        own = self.options
        window = own.window or own.model.window or self.request.context_tokens or DEFAULT_WINDOW
        spent = limit + count_text(told) + 4 * MESSAGE_TOKENS + 32 + options_tokens(self._request_options())
        spent += estimate(self.request.prompt)
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
        prompt = [dict(m) for m in self.request.prompt]
        for _ in range(2):
            last = {"role": "user", "content": f"{fence(target, TARGET)}\n\n{told(strict)}"}
            reply = await self.options.model.ask(
                opens_with_user([*prompt, *before, last]), max_tokens=limit, options=self._request_options()
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


def facts_of(source_tokens: int) -> int:
    """Tokens that the facts of a block of this size may have."""
    return min(MAX_FACTS, max(LEAST_FACTS, source_tokens // FACTS_PART))


def always(summaries: Sequence[str]) -> int:
    """Tokens of what is carried in any case: pins, live tasks and tool names."""
    facts = replace(durable.carried(summaries), **dict.fromkeys(durable.QUOTA, ()))
    return count_text(durable.render(facts))


def half(summaries: Sequence[str]) -> int:
    """Half the tokens of what these say, without what is carried."""
    return max(MIN_SUMMARY // 2, sum(count_text(durable.strip(text)) for text in summaries) // 2)


def _system(found: Sequence[InputUnit]) -> list[InputUnit]:
    lead = next(
        (k for k, u in enumerate(found) if u.messages[0].get("role") not in ("system", "developer")), len(found)
    )
    return list(found[:lead])


def _too_long(reply: ModelReply, text: str, limit: int) -> bool:
    return was_cut(reply) or count_text(text) > OVER_CAP * limit + MIN_INPUT

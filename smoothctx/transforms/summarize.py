"""Summarize: one summary message stands for a run of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigurationError, InvalidOutput, TransformError
from ..tokens import MESSAGE_TOKENS, count_text
from ..usage import Usage
from . import facts as durable
from .base import Locality, Rewrite, Size, TransformRequest, check_size, fingerprint
from .inputs import InputUnit, fence, head, opens_with_user, pieces, plain, transcript, units
from .model import Model, ModelReply, estimate, options_tokens
from .prompts import PART, STANDALONE_SYSTEM, instruction, missing
from .replies import clean, was_cut

LAYOUTS = ("aligned", "standalone")
SOURCES = ("view", "raw")
#: the summariser's window where nobody tells us
DEFAULT_WINDOW = 128_000
#: the least room for input that is worth asking for
MIN_INPUT = 64
#: a text this many times over its cap is treated as cut off: a plain callable may ignore ``max_tokens``
OVER_CAP = 2


class Summarize:
    """Replaces a run of messages by one summary message written by a model, with durable facts beside it.

    Args:
        model: an engine, or ``async def model(messages, *, max_tokens=None) -> str``.
        keep: what stays raw at the end of the view.
        layout: ``"aligned"`` sends the conversation as the agent sends it with the instruction last, so that
            it reuses the agent's KV cache; ``"standalone"`` sends a plain-text transcript.
        source: ``"view"`` extends the last summary with what is new; ``"raw"`` summarises raw history anew.
        max_tokens: cap of the model's text, in tokens.
        prompt: replaces the built-in instruction.
        facts: carry paths, ids, URLs, numbers, tool names and live tasks word for word beside the model's
            text. Texts that the user pinned are carried in any case.
        model_id: names a plain callable, so that its summaries may be shared and stored.
        window: the summariser's own context window in tokens; by default the engine's, else the agent's.
            Input that does not fit is summarised in parts.
        fixed_tokens: for benchmarks only: a text that was cut off at ``max_tokens`` is accepted.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    name = "summarize"
    locality = Locality.PREFIX

    def __init__(
        self,
        model: Any,
        *,
        keep: Size = ("messages", 20),
        layout: str = "aligned",
        source: str = "view",
        max_tokens: int = 1024,
        prompt: str | None = None,
        facts: bool = True,
        model_id: str | None = None,
        window: int | None = None,
        fixed_tokens: bool = False,
    ) -> None:
        self._model = Model(model, model_id=model_id)
        self.keep = check_size("keep", keep)
        for option, value, allowed in (("layout", layout, LAYOUTS), ("source", source, SOURCES)):
            if value not in allowed:
                raise ConfigurationError(f"{option}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        _count("max_tokens", max_tokens)
        if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
            raise ConfigurationError(f"prompt={prompt!r}: expected a text that is not empty, or None")
        for option, flag in (("facts", facts), ("fixed_tokens", fixed_tokens)):
            if not isinstance(flag, bool):
                raise ConfigurationError(f"{option}={flag!r}: expected True or False")
        if window is not None:
            _count("window", window)
            if window <= max_tokens + MIN_INPUT:
                raise ConfigurationError(f"window={window!r}: must leave room for input beside max_tokens={max_tokens}")
        self.layout, self.source, self.max_tokens = layout, source, max_tokens
        self.prompt, self.facts, self.window, self.fixed_tokens = prompt, facts, window, fixed_tokens
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
        return fingerprint(
            self.name,
            {
                "model": self._model.identity,
                "keep": self.keep,
                "layout": self.layout,
                "source": self.source,
                "max_tokens": self.max_tokens,
                "prompt": self._instruction(strict=False),
                "facts": self.facts,
                "window": self.window,
                "fixed_tokens": self.fixed_tokens,
            },
        )

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Write the summary. Without anything new since the last one, the messages come back as they are.

        Raises:
            InvalidOutput: the model's answer is of no use (empty, a tool call, cut off twice, ...).
            TransformError: there is nothing to summarise, or the summariser's window is too small.
            EngineError: the model server failed.
        """
        codec = request.codec
        if not request.messages:
            raise TransformError("summarize: there are no messages to summarise")
        if all(codec.summary_text(m) is not None for m in request.messages):
            return Rewrite(messages=list(request.messages))
        run = _Run(self, self._model, request)
        text = await run.text()
        kept = self._facts(request)
        section = durable.render(kept)
        message = codec.summary(f"{text}\n\n{section}" if section else text)
        return Rewrite(messages=[message], usage=run.usage, text=text)

    def _facts(self, request: TransformRequest) -> durable.Facts:
        earlier = durable.parse(request.earlier_summary) if request.earlier_summary else None
        if not self.facts:
            pins = durable.message_pins(request.messages, request.codec)
            carried = earlier.pins if earlier else ()
            return durable.Facts(pins=tuple(dict.fromkeys([*carried, *pins, *request.pins])))
        source = sum(map(request.codec.estimate, request.messages))
        return durable.extract(
            request.messages,
            request.codec,
            earlier=earlier,
            pins=request.pins,
            live_tasks=request.live_tasks,
            max_tokens=min(durable.MAX_TOKENS, max(96, source // 4)),
        )

    def _instruction(self, *, strict: bool) -> str:
        where = "above" if self.layout == "aligned" else "in the transcript"
        return instruction(self.prompt, where=where, max_tokens=self.max_tokens, strict=strict)

    def __repr__(self) -> str:
        return f"Summarize({self._model.identity or 'model'}, layout={self.layout!r})"


@dataclass(slots=True)
class _Run:
    """One application: asks the model once, or once per part, and adds up what that cost."""

    options: Summarize
    model: Model
    request: TransformRequest
    usage: Usage = field(default_factory=Usage)

    async def text(self) -> str:
        request, aligned = self.request, self.options.layout == "aligned"
        codec = request.codec
        shown = list(request.messages if request.shown is None else request.shown)
        before: list[Any] = list(request.before) if aligned else []
        earlier = request.earlier_summary
        if self.options.source == "view" and earlier and not any(codec.summary_text(m) is not None for m in shown):
            shown = [codec.summary(earlier), *shown]
        room = self._room()
        if aligned:
            found = units([*before, *shown], codec)
            if sum(u.tokens for u in found) <= room:
                return await self._ask([m for u in found for m in u.messages])
        elif count_text(text := transcript(shown, codec)) + MESSAGE_TOKENS <= room:
            return await self._ask(self._transcript(text))
        return await self._in_parts(before, shown, room)

    def _room(self) -> int:
        """Tokens of input that fit the summariser's window beside the instruction and the answer."""
        options = self.options
        window = options.window or self.model.window or self.request.context_tokens or DEFAULT_WINDOW
        told = options._instruction(strict=True) + missing(self.request.missed)
        spent = options.max_tokens + count_text(told) + 2 * MESSAGE_TOKENS
        spent += options_tokens(self._request_options())
        if options.layout == "standalone":
            spent += count_text(STANDALONE_SYSTEM) + 16
        else:
            spent += estimate(self.request.prompt)
        if window - spent < MIN_INPUT:
            raise TransformError(
                f"summarize: the summariser's window of {window} tokens leaves {window - spent} for input "
                f"beside the instruction, the tools and max_tokens={options.max_tokens}"
            )
        return window - spent

    async def _in_parts(self, before: Sequence[Any], shown: Sequence[Any], room: int) -> str:
        """Windows at message boundaries; each carries what was written of the ones before it."""
        codec, cap = self.request.codec, self.options.max_tokens
        lead = units(before, codec)
        lead_tokens = sum(u.tokens for u in lead)
        if lead_tokens > room // 2:
            lead, lead_tokens = (
                [],
                0,
            )  # what does not fit beside them is worth more than the agent's instructions
        # The running summary may be as long as its cap; a small window gives it half of what is left.
        carried_tokens = min(cap, (room - lead_tokens) // 2)
        free = room - lead_tokens - carried_tokens - count_text(PART) - 2 * MESSAGE_TOKENS - 16
        if free < MIN_INPUT // 2:
            raise TransformError(f"summarize: {room} tokens of input are too few to summarise in parts")
        running: str | None = None
        found = units(shown, codec)
        if self.options.layout == "standalone":
            found = [replace(u, tokens=count_text(transcript(u.source, codec)) + MESSAGE_TOKENS) for u in found]
        windows = _windows(found, codec, free)
        for number, window in enumerate(windows, 1):
            carried = [] if running is None else [codec.to_openai(codec.summary(head(running, carried_tokens)))]
            if self.options.layout == "aligned":
                note = [{"role": "user", "content": PART.format(number=number)}] if running is not None else []
                messages = (
                    [m for u in lead for m in u.messages] + carried + note + [m for u in window for m in u.messages]
                )
            else:
                text = transcript([m for u in window for m in u.source], codec)
                head_text = "" if running is None else f"{PART.format(number=number)}\n{carried[0]['content']}\n"
                messages = self._transcript(text, head_text)
            running = await self._ask(messages)
        assert running is not None
        return running

    def _transcript(self, text: str, before: str = "") -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": STANDALONE_SYSTEM},
            {"role": "user", "content": before + fence(text)},
        ]

    async def _ask(self, messages: list[dict[str, Any]]) -> str:
        """One text for these messages, asked for a second time, shorter, if the first was cut off."""
        for strict in (False, True):
            reply = await self.model.ask(
                self._with_instruction(messages, strict=strict),
                max_tokens=self.options.max_tokens,
                options=self._request_options(),
            )
            self.usage += reply.usage
            if self.request.on_usage is not None:
                self.request.on_usage(reply.usage)
            text = clean(reply)
            if not self._too_long(reply, text):
                return text
        raise InvalidOutput(
            f"summary: cut off at max_tokens={self.options.max_tokens}, also when asked for a shorter text"
        )

    def _too_long(self, reply: ModelReply, text: str) -> bool:
        if self.options.fixed_tokens:
            return False
        return was_cut(reply) or count_text(text) > OVER_CAP * self.options.max_tokens + MIN_INPUT

    def _with_instruction(self, messages: list[dict[str, Any]], *, strict: bool) -> list[dict[str, Any]]:
        text = self.options._instruction(strict=strict) + missing(self.request.missed)
        if self.options.layout == "aligned":
            prompt = [dict(m) for m in self.request.prompt]
            return opens_with_user([*prompt, *messages, {"role": "user", "content": text}])
        system, user = messages
        return [system, {"role": "user", "content": f"{user['content']}\n\n{text}"}]

    def _request_options(self) -> Mapping[str, Any]:
        """What makes the request reuse the agent's prefix; tools are shown for that alone. One that does not extend it
        gets a place in which it is in nobody's way, all the same."""
        if not self.model.is_engine:
            return {}
        options = dict(self.request.options)
        if self.options.layout != "aligned":
            return {k: v for k, v in options.items() if k == "lookahead"}
        if options.get("tools"):
            options["tool_choice"] = "none"
        return options


def _windows(found: Sequence[InputUnit], codec: Any, free: int) -> list[list[InputUnit]]:
    """Units in windows of at most ``free`` tokens; one larger than that is cut into pieces of text."""
    windows: list[list[InputUnit]] = []
    used = free + 1
    for unit in found:
        parts = [unit] if unit.tokens <= free else _pieces(unit, codec, free)
        for part in parts:
            if used + part.tokens > free:
                windows.append([])
                used = 0
            windows[-1].append(part)
            used += part.tokens
    return windows


def _pieces(unit: InputUnit, codec: Any, free: int) -> list[InputUnit]:
    label = "[one long message, piece by piece]\n"
    size = free - count_text(label) - 2 * MESSAGE_TOKENS
    cut = []
    for text in pieces(plain(transcript(unit.source, codec)), max(16, size)):
        message = codec.user(label + text)
        cut.append(
            InputUnit((codec.to_openai(message),), count_text(text) + count_text(label) + MESSAGE_TOKENS, (message,))
        )
    return cut


def _count(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{option}={value!r}: expected a number of tokens above 0")

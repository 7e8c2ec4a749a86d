"""What a context can say about itself in a component config: its options, its client and the context that it wraps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from autogen_core import ComponentModel
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError, WithJsonSchema

from smoothctx import (
    BreakEven,
    ConfigurationError,
    Finish,
    Immediate,
    KeepRecent,
    KStepOff,
    Policy,
    Prices,
    Salvage,
    Speed,
    Summarize,
)

#: ``("fraction" | "tokens" | "messages", n)``
Size = tuple[Literal["fraction", "tokens", "messages"], int | float]

_DISCARD = {"salvage": Salvage, "immediate": Immediate, "finish": Finish}


_NAMED: dict[str, Any] = {"KStepOff": KStepOff, "BreakEven": BreakEven, "Speed": Speed, "Prices": Prices}


def _write_rule(rule: Any) -> Any:
    """A commit rule as plain values: its name, and its fields where it has some."""
    if type(rule) not in _NAMED.values():
        return rule
    if isinstance(rule, BreakEven):  # not asdict, which would not name the rates
        fields = {
            "turns": rule.turns,
            "output_tokens": rule.output_tokens,
            "cached_share": rule.cached_share,
            "rates": _write_rule(rule.rates),
        }
    else:
        fields = asdict(rule)
    return {"name": type(rule).__name__, **{name: value for name, value in fields.items() if value is not None}}


def _read_rule(value: Any) -> Any:
    """What :func:`_write_rule` wrote; a rule or a word as it is.

    Raises:
        ValueError: it is none of these.
    """
    if not isinstance(value, Mapping):
        if isinstance(value, str | KStepOff | BreakEven):
            return value
        raise ValueError("expected a word, KStepOff(k), BreakEven(...), or one of these as it is written")
    fields = {name: _read_rule(v) if name == "rates" else v for name, v in value.items() if name != "name"}
    made = _NAMED.get(str(value.get("name")))
    if made is None:
        raise ValueError(f"name={value.get('name')!r}: expected one of {', '.join(_NAMED)}")
    try:
        return made(**fields)
    except (TypeError, ConfigurationError) as error:
        raise ValueError(str(error)) from error


#: a commit rule, which a component config holds as plain values
Rule = Annotated[
    str | KStepOff | BreakEven,
    PlainValidator(_read_rule),
    PlainSerializer(_write_rule),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]


class LookaheadOptions(BaseModel):
    """When and how a context is summarised, as plain values: what a component config can hold.

    Every field is the option of the same name of ``smoothctx.Policy`` or ``smoothctx.Summarize``; some differ.
    ``commit`` takes a rule too: ``KStepOff(4)``, or as it stands in a config, ``{"name": "KStepOff", "k": 4}``.
    ``layout`` is ``"standalone"``: the summariser gets a transcript, which every client takes, with or without tools
    and images, and the agent's system message is not part of the context. So ``preload_kv`` is ``False``: what is
    preloaded would not be what an agent with a system message sends, unless the context is given it in ``request=``:
    ``{"messages": [{"role": "system", "content": "..."}], "tools": [...]}``; then ask for it with ``"auto"`` or
    ``True``. ``fallback_keep`` is what ``KeepRecent`` keeps at the hard limit. Values are checked where the context is
    made (``ConfigurationError``).
    """

    model_config = ConfigDict(extra="forbid")

    context_window: int | None = None
    trigger: Size | list[Size] = ("fraction", 0.60)
    hard_limit: Size = ("fraction", 0.85)
    land_at: Size = ("fraction", 0.40)
    reserved_tokens: int = 0
    commit: Rule = "ready"
    overrun: str = "promote"
    max_wait: float = 30.0
    discard: Literal["salvage", "immediate", "finish"] = "salvage"
    min_savings: float = 0.30
    max_message_tokens: int | None = None
    idle: float | None = None
    preload_kv: bool | Literal["auto"] = False
    keep: Size = ("messages", 20)
    fallback_keep: Size = ("messages", 20)
    layout: str = "standalone"
    source: str = "view"
    max_tokens: int = 1024
    prompt: str | None = None
    facts: bool = True
    window: int | None = None

    def policy(self, model: Any, *, model_id: str | None = None) -> Policy:
        """The policy that these options describe, summarising with ``model``.

        Raises:
            ConfigurationError: naming option, value and what is allowed.
        """
        summarize = Summarize(
            model,
            model_id=model_id,
            keep=self.keep,
            layout=self.layout,
            source=self.source,
            max_tokens=self.max_tokens,
            prompt=self.prompt,
            facts=self.facts,
            window=self.window,
        )
        return Policy(
            summarize,
            trigger=self.trigger,
            hard_limit=self.hard_limit,
            land_at=self.land_at,
            context_window=self.context_window,
            reserved_tokens=self.reserved_tokens,
            commit=self.commit,
            overrun=self.overrun,
            max_wait=self.max_wait,
            fallback=KeepRecent(keep=self.fallback_keep),
            discard=_DISCARD[self.discard](),
            min_savings=self.min_savings,
            max_message_tokens=self.max_message_tokens,
            idle=self.idle,
            preload_kv=self.preload_kv,
        )


def read_options(options: Any) -> LookaheadOptions:
    """Options as they are given: as such, as a mapping of their fields, or not at all.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    if options is None:
        return LookaheadOptions()
    if isinstance(options, LookaheadOptions):
        return options
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"options={options!r}: expected LookaheadOptions, a mapping of its fields, or None")
    unknown = [name for name in options if name not in LookaheadOptions.model_fields]
    if unknown:
        allowed = ", ".join(LookaheadOptions.model_fields)
        raise ConfigurationError(f"options: {unknown[0]!r} is unknown; expected some of {allowed}")
    try:
        return LookaheadOptions.model_validate(dict(options))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        expected = " or ".join(dict.fromkeys(e["msg"] for e in error.errors() if e["loc"][0] == name))
        raise ConfigurationError(f"options: {name}={options[name]!r}: {expected}") from None


class LookaheadContextConfig(BaseModel):
    """The component config of :class:`LookaheadChatCompletionContext`."""

    model_client: ComponentModel
    inner: ComponentModel | None = None
    options: LookaheadOptions = Field(default_factory=LookaheadOptions)
    tenant: str = "default"

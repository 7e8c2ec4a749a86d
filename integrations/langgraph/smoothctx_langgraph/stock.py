"""Any middleware with a ``before_model`` hook as a lookahead: its work is done ahead of time, beside the agent."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain.agents.middleware import SummarizationMiddleware
from langchain.agents.middleware.types import AgentMiddleware
from langgraph.runtime import Runtime as GraphRuntime

from smoothctx import KeepRecent, Policy, Runtime
from smoothctx.errors import ConfigurationError, InvalidOutput
from smoothctx.transforms.base import Locality, Rewrite, TransformRequest, fingerprint

from .codec import LangChainMessages
from .isolation import isolated
from .middleware import LookaheadMiddleware
from .middleware_commit import LookaheadStateMiddleware
from .models import ChatModel
from .options import Tenant, check_mode
from .stock_fold import Snapshot, folded, rewritten, snapshot
from .stock_limits import limits, own_keep
from .stock_usage import metered

_ELSEWHERE = tuple(
    prefix + hook
    for hook in ("before_agent", "after_model", "after_agent", "wrap_model_call", "wrap_tool_call")
    for prefix in ("", "a")
)
#: messages that are copied before others get their turn on the loop
SLICE = 200
#: what may be said of the policy, beside the sizes and the transform
_POLICY = [f.name for f in dataclasses.fields(Policy) if f.init and f.name != "transform"]
#: what older versions of LangChain's summaries say where there should be one
_NO_SUMMARY = "\n\nError generating summary: "


class StockTransform:
    """The transform that a middleware's ``before_model`` is: run on a finished run of messages, in isolation.

    The hook gets copies of the messages, all but the newest segment, as the model sees them now, and a runtime without
    store or context. What it returns is folded as the state's reducer would. The middleware itself is not changed;
    LangChain's own ``SummarizationMiddleware`` is asked for its summary without regard to its own trigger, so that
    the work can begin before it is due.

    Args:
        middleware: has ``before_model`` or ``abefore_model``, and nothing else.
        identity: names everything its work depends on, so that it may be stored and shared. Known by itself for a
            ``SummarizationMiddleware`` whose chat model tells its name; without one the work stays in this process.

    Raises:
        ConfigurationError: it has no such hook, or does more than that: jumps, tools, or other hooks.
    """

    locality = Locality.PREFIX
    source = "view"
    #: what stays at the end is the middleware's own choice
    keep = ("messages", 0)

    def __init__(self, middleware: AgentMiddleware[Any, Any, Any], *, identity: str | None = None) -> None:
        _check(middleware)
        if identity is not None and (not isinstance(identity, str) or not identity.strip()):
            raise ConfigurationError(f"identity={identity!r}: expected a text that names its work, or None")
        self.middleware = middleware
        self.name = f"stock:{middleware.name}"
        self._eager = _eager(middleware)
        named = identity if identity is not None else _described(middleware)
        self.fingerprint: str | None = None if named is None else fingerprint(self.name, {"identity": named})

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Run the hook. Where it finds nothing to do, the messages come back as they are.

        Raises:
            TransformError: it did more than change messages.
            InvalidOutput: it says that it failed.
        """
        given = await _copied(request.messages if request.shown is None else request.shown)
        with isolated(), metered(request.on_usage) as meter:
            update = await self._run({"messages": list(given.copies)})
        if update is None:
            return Rewrite(messages=list(request.messages), usage=meter.total)
        after = rewritten(folded(update, given), given, request.messages, request.codec)
        known = {id(m) for m in request.messages}
        for message in after:
            if id(message) not in known and _NO_SUMMARY in request.codec.text(message):
                raise InvalidOutput(f"{self.name}: it put an error in place of a summary")
        return Rewrite(messages=after, usage=meter.total)

    async def _run(self, state: Any) -> Any:
        hook = self._eager
        runtime: Any = GraphRuntime()
        if _overrides(hook, "abefore_model"):
            return await hook.abefore_model(state, runtime)
        return await asyncio.to_thread(hook.before_model, state, runtime)

    def __repr__(self) -> str:
        return f"StockTransform({self.middleware!r})"


def lookahead_stock(
    middleware: AgentMiddleware[Any, Any, Any],
    runtime: Runtime,
    *,
    mode: str = "view",
    name: str | None = None,
    identity: str | None = None,
    trigger: Any = None,
    hard_limit: Any = None,
    land_at: Any = None,
    context_window: int | None = None,
    codec: LangChainMessages | None = None,
    tenant: Tenant = "default",
    engine: Any = None,
    request: Mapping[str, Any] | None = None,
    **options: Any,
) -> LookaheadMiddleware | LookaheadStateMiddleware:
    """An unmodified middleware with ``before_model``, such as LangChain's ``SummarizationMiddleware``, as a lookahead.

    Give what this returns to ``create_agent`` in its place. Its errors never reach a turn.

    Sizes that are not given are read off the middleware's ``trigger`` and ``keep``. Work starts at its trigger where
    there is room above it: up to twice as many messages, or half-way to the model's window where that is known. Where
    it is not, the trigger becomes the hard limit and work starts at three quarters of it. At the hard limit a turn
    waits for what is under way (``max_wait`` at most), then old messages go.

    Args:
        middleware: the middleware.
        runtime: open for as long as the agent is used.
        mode: ``"view"``: the state keeps the messages; ``"state"``: it is rewritten, as the middleware would.
        name: by default the middleware's own.
        identity: see :class:`StockTransform`.
        trigger: where its work starts.
        hard_limit: what the model is never sent more than.
        land_at: where the fallback brings the view.
        context_window: the model's window in tokens.
        codec: how messages are read.
        tenant: whose conversations these are: a name, or a function of the run's config.
        engine: the agent's own engine, to preload the view that a commit will produce.
        request: the constant part of the agent's request.
        options: any other option of :class:`smoothctx.Policy`; ``min_savings`` is 0.05 here.

    Raises:
        ConfigurationError: see :class:`StockTransform`; a size that is missing and cannot be read off; or an option
            that is wrong or unknown, naming it, its value and what is allowed.
    """
    check_mode(mode)
    unknown = [option for option in options if option not in _POLICY]
    if unknown:
        raise ConfigurationError(f"{unknown[0]}={options[unknown[0]]!r}: no such option; expected {', '.join(_POLICY)}")
    transform = StockTransform(middleware, identity=identity)
    sizes = limits(middleware, trigger=trigger, hard_limit=hard_limit, land_at=land_at, context_window=context_window)
    keep = own_keep(middleware)
    if keep is not None:
        options.setdefault("fallback", KeepRecent(keep))
    policy = Policy(transform, **{"min_savings": 0.05, **sizes, **options})
    kind = LookaheadMiddleware if mode == "view" else LookaheadStateMiddleware
    return kind(
        runtime, policy, name=name or middleware.name, codec=codec, tenant=tenant, engine=engine, request=request
    )


async def _copied(messages: Sequence[Any]) -> Snapshot:
    """A snapshot, slice by slice: the loop may be the agent's own."""
    given = snapshot(())
    for start in range(0, len(messages), SLICE):
        more = snapshot(messages[start : start + SLICE])
        given = Snapshot((*given.originals, *more.originals), (*given.copies, *more.copies))
        await asyncio.sleep(0)
    return given


def _check(middleware: Any) -> None:
    if not isinstance(middleware, AgentMiddleware):
        raise ConfigurationError(f"middleware={middleware!r}: expected an AgentMiddleware")
    what = f"middleware={middleware.name}"
    hooks = [h for h in ("before_model", "abefore_model") if _overrides(middleware, h)]
    if not hooks:
        raise ConfigurationError(f"{what}: it has no before_model, so there is nothing to prepare ahead")
    for hook in hooks:
        if jumps := getattr(getattr(type(middleware), hook), "__can_jump_to__", None):
            raise ConfigurationError(
                f"{what}: its {hook} may jump to {', '.join(jumps)}; a jump cannot come a turn late"
            )
    if others := [h for h in _ELSEWHERE if _overrides(middleware, h)]:
        raise ConfigurationError(f"{what}: only its before_model could run ahead; it also has {', '.join(others)}")
    if getattr(middleware, "tools", None):
        raise ConfigurationError(f"{what}: only its before_model could run ahead; it also brings tools")


def _overrides(middleware: Any, hook: str) -> bool:
    own = getattr(type(middleware), hook, None)
    return own is not None and own is not getattr(AgentMiddleware, hook, None)


def _eager(middleware: AgentMiddleware[Any, Any, Any]) -> AgentMiddleware[Any, Any, Any]:
    """A twin of LangChain's summaries that does not ask whether it is time: our policy has asked."""
    if not isinstance(middleware, SummarizationMiddleware) or not hasattr(middleware, "_should_summarize"):
        return middleware
    twin: Any = copy.copy(middleware)
    twin._should_summarize = lambda *_, **__: True
    return cast("AgentMiddleware[Any, Any, Any]", twin)


def _described(middleware: AgentMiddleware[Any, Any, Any]) -> str | None:
    """What the work of LangChain's summaries depends on; ``None`` for any other middleware."""
    if type(middleware) is not SummarizationMiddleware or getattr(middleware, "summarizer", None) is not None:
        return None
    counter = getattr(middleware.token_counter, "func", middleware.token_counter)
    try:
        model = ChatModel(getattr(middleware, "_summary_chat_model", middleware.model)).identity
    except ConfigurationError:
        return None
    parts = {
        "model": model,
        "keep": middleware.keep,
        "prompt": middleware.summary_prompt,
        "trim": middleware.trim_tokens_to_summarize,
        "counter": getattr(counter, "__qualname__", type(counter).__name__),
    }
    return fingerprint("SummarizationMiddleware", parts)

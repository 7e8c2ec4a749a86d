"""The context of an AutoGen agent, summarised ahead of time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, Self

from autogen_core import Component, ComponentModel
from autogen_core.model_context import ChatCompletionContext, UnboundedChatCompletionContext
from autogen_core.models import AssistantMessage, ChatCompletionClient, LLMMessage

from smoothctx import ClosedError, ConfigurationError, Policy, Reason, Runtime, Session

from .checks import RawTurns, check_engine, check_flag, check_policy, check_request, check_runtime, check_text, warn
from .codec import AutoGenMessages
from .config import LookaheadContextConfig, LookaheadOptions, read_options
from .model import client_model
from .process import default_runtime, is_own
from .results import Results

#: our key beside ``messages`` in a saved state
STATE_KEY = "smoothctx"
STATE_VERSION = 1

_CODEC = AutoGenMessages()


class LookaheadChatCompletionContext(ChatCompletionContext, Component[LookaheadContextConfig]):
    """A model context whose old messages are summarised in the background and replaced at the next inference.

    It wraps another context, which keeps the whole history; ``get_messages`` returns that history with summaries
    standing for its finished part. Below the hard limit it never waits for anything of ours, and whatever goes wrong
    in the background leaves the raw messages. Messages that are not replaced are the same objects.

    The model client may be the agent's own: background calls run on the agent's event loop, wherever the runtime
    runs. With ``own_client=True`` nobody else uses it, and its calls run on the runtime's loop.

    A runtime that was closed leaves the raw messages, and each context says so once (event ``turn.raw``, and a warning
    of the logger ``smoothctx.autogen``).

    Args:
        model_client: writes the summaries.
        options: when and how, as plain values (what a component config can hold), or a mapping of these.
        inner: the context that holds the messages; unbounded by default. One that drops messages itself is taken for
            an edited history, so little can be prepared for it.
        policy: a full policy in place of ``model_client`` and ``options``. Such a context cannot be dumped.
        runtime: an open ``smoothctx.Runtime``; by default that of the process (see ``default_runtime``).
        tenant: whose conversation this is: what tenants leave in a shared store is never mixed.
        engine: the agent's own engine: background work keeps out of its turns' way there. For preloads see
            ``LookaheadOptions``. Like the runtime it is in no component config.
        request: the constant part of the agent's requests.
        own_client: the client belongs to this context alone. Set for a context loaded from a config.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
        ClosedError: at its first use, where the runtime was never opened.
    """

    component_config_schema = LookaheadContextConfig
    component_provider_override = "smoothctx_autogen.LookaheadChatCompletionContext"

    def __init__(
        self,
        model_client: ChatCompletionClient | None = None,
        *,
        options: LookaheadOptions | Mapping[str, Any] | None = None,
        inner: ChatCompletionContext | None = None,
        policy: Policy | None = None,
        runtime: Runtime | None = None,
        tenant: str = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
        own_client: bool = False,
    ) -> None:
        super().__init__()
        if (model_client is None) == (policy is None):
            raise ConfigurationError("model_client, policy: expected exactly one of them")
        if model_client is not None and not isinstance(model_client, ChatCompletionClient):
            raise ConfigurationError(f"model_client={model_client!r}: expected a ChatCompletionClient")
        if policy is not None and options is not None:
            raise ConfigurationError("options: they go with model_client; a policy has its own")
        if policy is not None:
            check_policy(policy)
        if inner is not None and not isinstance(inner, ChatCompletionContext):
            raise ConfigurationError(f"inner={inner!r}: expected a ChatCompletionContext")
        if isinstance(inner, LookaheadChatCompletionContext):
            raise ConfigurationError(f"inner={inner!r}: it is one of these itself; use it as it is")
        if runtime is not None:
            check_runtime(runtime)
        check_text("tenant", tenant)
        check_engine(engine)
        check_request(request)
        check_flag("own_client", own_client)
        if own_client and policy is not None:
            raise ConfigurationError("own_client: it goes with model_client; a policy has its own model")
        self._inner = inner if inner is not None else UnboundedChatCompletionContext()
        self._client = model_client
        self._options = read_options(options)
        self._model = client_model(model_client) if model_client is not None else None
        self._policy = policy if policy is not None else self._options.policy(self._model)
        self._own_client = own_client
        self._runtime = runtime
        self._tenant = tenant
        self._engine, self._request = engine, request
        self._session: Session | None = None
        self._carried: list[str] = []  # from a saved state, until the first view is made
        self._results = Results()
        self._raw = RawTurns("autogen")

    # -- what AutoGen calls --------------------------------------------------------------------------------------

    async def add_message(self, message: LLMMessage) -> None:
        """Add a message to the inner context. Behind a reply, what is due is started."""
        opened = self._begin("add_message") is not None
        await self._inner.add_message(message)
        if not opened or not isinstance(message, AssistantMessage):
            return  # behind any other an inference follows, which looks at it itself
        try:
            session = self._open()
            session.observe(self._results.unpack(await self._inner.get_messages()).messages)
        except Exception as error:
            self._report(error, "add_message")

    async def get_messages(self) -> list[LLMMessage]:
        """The messages for the next inference: a new list. Cheap, and any number of calls gives the same."""
        messages = await self._inner.get_messages()
        session = self._begin("get_messages")
        if session is None:
            return list(messages)
        try:
            unpacked = self._results.unpack(messages)
            view = await session.commit(unpacked.messages)
            if session is self._session:
                self._carried = []
            return unpacked.pack(view)
        except Exception as error:
            self._report(error, "get_messages")
            return list(messages)

    async def clear(self) -> None:
        """Forget everything: the messages, the summaries, and what is being prepared."""
        self._forget()
        try:
            await self._inner.clear()
        finally:
            self._forget()  # whatever was looked at meanwhile

    async def save_state(self) -> Mapping[str, Any]:
        """The inner context's state, and under a key of our own what stands for its old messages. JSON."""
        state = dict(await self._inner.save_state())
        saved = [*self._carried]
        if self._session is not None:
            saved += [text for text in self._session.saved() if text not in saved]
        if saved:
            state[STATE_KEY] = {"version": STATE_VERSION, "committed": saved}
        return state

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, of this or of any plain context. Summaries apply where the messages are the same
        as they were."""
        rest = {key: value for key, value in state.items() if key != STATE_KEY}
        await self._inner.load_state(rest)
        self._forget()
        self._carried = self._read(state.get(STATE_KEY))

    # -- for the application -------------------------------------------------------------------------------------

    @property
    def inner(self) -> ChatCompletionContext:
        """The wrapped context: the whole history."""
        return self._inner

    @property
    def session(self) -> Session:
        """The session that follows this context: receipts, pins, ``retrieve``. Another one after ``clear``.

        Raises:
            ClosedError: the runtime is not open.
        """
        return self._open()

    # -- component -----------------------------------------------------------------------------------------------

    def _to_config(self) -> LookaheadContextConfig:
        if self._client is None:
            raise NotImplementedError(
                "a LookaheadChatCompletionContext with a policy cannot be dumped: give it model_client and options"
            )
        return LookaheadContextConfig(
            model_client=_component(self._client.dump_component()),
            inner=_component(self._inner.dump_component()),
            options=self._options,
            tenant=self._tenant,
        )

    @classmethod
    def _from_config(cls, config: LookaheadContextConfig) -> Self:
        inner = None if config.inner is None else ChatCompletionContext.load_component(config.inner)
        return cls(
            ChatCompletionClient.load_component(config.model_client),
            options=config.options,
            inner=inner,
            tenant=config.tenant,
            own_client=True,
        )

    # -- the session ---------------------------------------------------------------------------------------------

    def _begin(self, where: str) -> Session | None:
        """The session, as the agent's turn needs it, on the agent's loop; ``None`` where there can be none, and the raw
        messages do."""
        try:
            if self._model is not None and not self._own_client:
                self._model.home = asyncio.get_running_loop()  # what only looks at the session may run anywhere
            return self._open()
        except ClosedError as error:
            runtime = self._runtime or default_runtime()
            if is_own(runtime):  # its thread has not come up in time: no fault of the caller's
                self._report(error, where)
            else:
                self._raw.refused(error, runtime)
        except Exception as error:
            self._report(error, where)
        return None

    def _open(self) -> Session:
        session = self._session
        if session is not None and not session.closed:
            return session
        runtime = self._runtime or default_runtime()
        if session is not None:  # the runtime closed it: what is committed stays so
            self._carried += [text for text in session.saved() if text not in self._carried]
        self._session = runtime.session(
            f"autogen-{uuid.uuid4().hex}",
            policy=self._policy,
            codec=_CODEC,
            tenant=self._tenant,
            engine=self._engine,
            request=self._request,
        )
        self._session.restore(self._carried)
        return self._session

    def _forget(self) -> None:
        session, self._session = self._session, None
        self._carried, self._results = [], Results()
        if session is not None:
            session.close_now(Reason.SESSION_CLOSED)

    def _read(self, ours: Any) -> list[str]:
        """What a saved state holds of ours; anything unknown in it is an event, and the raw messages do."""
        if ours is None:
            return []
        texts = ours.get("committed") if isinstance(ours, Mapping) and ours.get("version") == STATE_VERSION else None
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            self._report(
                ValueError(f"{STATE_KEY!r} in the saved state is not of version {STATE_VERSION}"), "load_state"
            )
            return []
        return list(texts)

    def _report(self, error: Exception, where: str) -> None:
        try:
            runtime = self._runtime or default_runtime()
            runtime.events.error(error, where=f"autogen.{where}", tenant=self._tenant)
        except Exception:  # not even a thread could be started
            warn("autogen", f"{where}: {error}")


def _component(component: ComponentModel) -> ComponentModel:
    """A copy of its own: loading one changes the provider's name in place."""
    return component.model_copy(deep=True)

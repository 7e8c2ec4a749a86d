"""Microsoft Agent Framework: a chat middleware that sends the model the view, and leaves the stored history raw.

    agent = Agent(client=client, middleware=[LookaheadMiddleware(runtime, policy)])

It runs once per model call, inside the tool loop as well. Its decision travels in the ``AgentSession``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

try:
    from agent_framework import (
        EXCLUDED_KEY,
        AgentSession,
        ChatContext,
        ChatMiddleware,
        ChatResponse,
        ChatResponseUpdate,
        Message,
        ResponseStream,
    )
except ImportError as error:
    raise ImportError(
        "smoothctx_autogen.agent_framework needs agent-framework-core: pip install 'smoothctx[agent-framework]'"
    ) from error

from smoothctx import Policy, Runtime, Session
from smoothctx.digest import ROOT, link
from smoothctx.errors import ConfigurationError
from smoothctx.lines import Lines

from .agent_framework_codec import AgentFrameworkMessages
from .agent_framework_model import ChatClientModel, background, in_background

__all__ = ["STATE_KEY", "AgentFrameworkMessages", "ChatClientModel", "LookaheadMiddleware", "background"]

#: where an ``AgentSession``'s state carries what is committed
STATE_KEY = "smoothctx"
#: version of what stands under it
STATE_VERSION = 1

LOADED_BEHIND = "the history is loaded behind this middleware (require_per_service_call_history_persistence)"

_log = logging.getLogger("smoothctx.agent_framework")


class LookaheadMiddleware(ChatMiddleware):
    """Rewrites what the model is sent, ahead of time; the history that the framework stores is never touched.

    One instance may serve any number of agents, sessions and runs at once. A conversation is known by its
    ``AgentSession`` and its messages: a copied or edited session is a branch of its own. Without a session the
    messages alone tell. What is committed is kept in ``session.state["smoothctx"]``, as JSON, and used again in the
    process that loads the session next, if the summariser has an identity.

    Where the service stores the history, the messages are only the newest ones: such calls pass, and it is said once
    (event ``history.elsewhere`` and a warning of the logger ``smoothctx.agent_framework``).

    Args:
        runtime: an open runtime.
        policy: what happens to the context. Instructions and tool schemas are no messages: count them in
            ``reserved_tokens``, unless the client reports its usage.
        name: tells this middleware's part of a session from another's, where agents with policies of their own share
            sessions.
        tenant: whose conversations these are.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(self, runtime: Runtime, policy: Policy, *, name: str = "agent", tenant: str = "default") -> None:
        if not isinstance(runtime, Runtime):
            raise ConfigurationError(f"runtime={runtime!r}: expected a Runtime")
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy={policy!r}: expected a Policy")
        for option, value in (("name", name), ("tenant", tenant)):
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{option}={value!r}: expected a text that is not empty")
        self.name = name
        self._runtime = runtime
        self._codec = AgentFrameworkMessages()
        self._lines = Lines(runtime, policy=policy, codec=self._codec, tenant=tenant)
        # what a session's state is known to hold: it is read and written only where that changes
        self._known: weakref.WeakKeyDictionary[Session, list[str]] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()
        # what these are given here is only the newest: something behind us puts the history before it, and stores it
        self._loaded_behind: weakref.WeakSet[AgentSession] = weakref.WeakSet()

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        """One model call: the view in place of the messages, the call, and what it answered."""
        if in_background():
            await call_next()
            return
        why = _elsewhere(context)
        if why is None and context.session is not None and context.session in self._loaded_behind:
            why = LOADED_BEHIND
        if why is not None:
            self._say(why)
            await call_next()
            return
        turn = await self._begin(context)
        if turn is None:
            await call_next()
            return
        try:
            await call_next()
            if context.session is not None and turn.got_history(context.messages):
                self._loaded_behind.add(context.session)
            if isinstance(context.result, ResponseStream):
                turn.follow(context)
                return
            if isinstance(context.result, ChatResponse):
                turn.answered(context.result)
        finally:
            if not turn.streams:
                turn.end()

    def sessions(self, session: AgentSession) -> list[Session]:
        """The open smoothctx sessions of an agent session, the one used last at the end: receipts, handles, pins."""
        return self._lines.sessions(self._bucket(session))

    async def forget(self, session: AgentSession) -> None:
        """Cancel what is prepared for this agent session and forget what was committed, also in its state."""
        await self._lines.close(self._bucket(session))
        held = session.state.get(STATE_KEY)
        views = held.get("views") if isinstance(held, Mapping) else None
        rest = {k: v for k, v in views.items() if k != self.name} if isinstance(views, Mapping) else {}
        if rest:
            session.state[STATE_KEY] = {"v": STATE_VERSION, "views": rest}
        else:
            session.state.pop(STATE_KEY, None)

    # -- one call --------------------------------------------------------------------------------------------

    async def _begin(self, context: ChatContext) -> _Turn | None:
        """Make the view. ``None`` where that failed: the call goes on with the messages it had."""
        turn = _Turn(self._codec)
        try:
            given = messages = list(context.messages)
            compacts = _compacts(context)
            if compacts:  # what its strategy left out before is not sent, and so is no part of the view
                messages = [m for m in given if m.additional_properties.get(EXCLUDED_KEY) is not True]
            session = turn.enter(self._lines, self._bucket(context.session, messages), messages)
            self._restore(context.session, session)
            view = await session.commit(messages)
            self._save(context.session, session)
            turn.call_begins()
            turn.view = context.messages = _own(view, messages, given, context if compacts else None)
            return turn
        except Exception as error:
            turn.end()
            self._runtime.events.error(error, where="agent_framework")
            return None
        except BaseException:  # the run was cancelled at the hard limit
            turn.end()
            raise

    def _bucket(self, session: AgentSession | None, messages: Sequence[Message] = ()) -> str:
        """Names the conversation: by the session, else by how it opens."""
        if session is not None:
            return f"agent-framework/{self.name}/{session.session_id}"
        opening = next((m for m in messages if m.role not in ("system", "developer")), None)
        if opening is None:
            return f"agent-framework/{self.name}/opening"
        self._codec.check(opening, messages.index(opening))
        return f"agent-framework/{self.name}/opening/{link(ROOT, self._codec, opening).hex()}"

    def _restore(self, held: AgentSession | None, session: Session) -> None:
        texts = _views(held, self.name)
        if texts and texts != self._known.get(session):
            session.restore(texts)
            self._known[session] = texts

    def _save(self, held: AgentSession | None, session: Session) -> None:
        """Only replaced as a whole: a copy of the state that somebody took stays what it was. What was committed on
        another branch stays until this one has something: it harms nobody, and the branch may come back."""
        texts = session.saved()
        if held is None or not texts:
            return
        if texts != _views(held, self.name):
            state = held.state.get(STATE_KEY)
            others = state.get("views") if isinstance(state, Mapping) else None
            others = others if isinstance(others, Mapping) else {}
            held.state[STATE_KEY] = {"v": STATE_VERSION, "views": {**others, self.name: texts}}
        self._known[session] = texts

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self._runtime.events.emit("history.elsewhere", why=why)
            _log.warning("LookaheadMiddleware leaves this agent's context alone: %s", why)

    def __repr__(self) -> str:
        return f"LookaheadMiddleware(name={self.name!r})"


class _Turn:
    """One model call under way: holds its session until the call is over, however it ends."""

    def __init__(self, codec: AgentFrameworkMessages) -> None:
        self.streams = False
        self.view: list[Message] = []
        self._codec = codec
        self._held = ExitStack()
        self._session: Session | None = None
        self._messages: list[Message] = []
        self._over = False
        self._foreground: Any = None
        self._call: Any = None

    def enter(self, lines: Lines, bucket: str, messages: list[Message]) -> Session:
        """Take the session that these messages belong to."""
        session = self._held.enter_context(lines.using(bucket, messages))
        self._session, self._messages = session, messages
        return session

    def call_begins(self) -> None:
        """From now on the call is in the foreground."""
        assert self._session is not None
        self._foreground = self._session.foreground()
        self._call = _now(self._foreground.__aenter__())

    def got_history(self, messages: Sequence[Message]) -> bool:
        """Did something behind us put messages that a provider had stored before the view?"""
        if not messages or any(m is messages[0] for m in self.view):
            return False
        source = messages[0].additional_properties.get("_attribution")
        return isinstance(source, Mapping) and "source_id" in source

    def answered(self, response: ChatResponse[Any]) -> None:
        """The reply is there, with what the provider says it cost."""
        reply = list(response.messages)
        if self._session is None or not reply:
            return
        self._codec.report(reply[-1], response.usage_details)
        self._messages = [*self._messages, *reply]
        if self._over:  # a stream ends before its response is put together
            self._session.observe(self._messages)

    def follow(self, context: ChatContext) -> None:
        """The call goes on as a stream, which somebody else reads, perhaps not to its end."""
        self.streams = True
        context.stream_update_transforms.append(self._update)
        context.stream_cleanup_hooks.append(self.end)
        context.stream_result_transforms.append(self._result)
        # Dropped without a word: it may be found at any point of any code, so nothing may be locked there.
        dropped = weakref.finalize(context.result, _later, asyncio.get_running_loop(), self.end)
        dropped.atexit = False

    def _update(self, update: ChatResponseUpdate) -> ChatResponseUpdate:
        if self._call is not None:
            self._call.first_token()
            self._call = None
        return update

    def _result(self, response: ChatResponse[Any]) -> None:
        self.answered(response)

    def end(self) -> None:
        """The call is over: with its reply, or without. Ending twice is fine."""
        if self._over:
            return
        self._over = True
        if self._foreground is not None:
            _now(self._foreground.__aexit__(None, None, None))
        if self._session is not None:
            self._session.observe(self._messages)
        self._held.close()


def _now(step: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing: a stream ends where nobody can await."""
    try:
        step.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("entering and leaving the foreground never waits")


def _later(loop: asyncio.AbstractEventLoop, run: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:  # the loop was closed, and every call on it with it
        pass


def _elsewhere(context: ChatContext) -> str | None:
    """Why the messages of this call are not the whole history; ``None`` where they are."""
    options = context.options or {}
    if options.get("conversation_id") or context.kwargs.get("conversation_id"):
        return "the call continues a conversation by its id (conversation_id), and carries only what is new"
    if context.session is not None and context.session.service_session_id:
        return "the session continues a conversation of the service (service_session_id)"
    stored = options.get("store")
    if stored is None:
        stored = getattr(context.client, "STORES_BY_DEFAULT", False)
    return "the service stores the history (store, STORES_BY_DEFAULT); store=False hands it back" if stored else None


def _compacts(context: ChatContext) -> bool:
    """Will a compaction strategy of the framework work on this call's messages?"""
    strategy = context.kwargs.get("compaction_strategy") or getattr(context.client, "compaction_strategy", None)
    return strategy is not None


def _own(
    view: Sequence[Message], messages: Sequence[Message], given: Sequence[Message], context: ChatContext | None
) -> list[Message]:
    """The view, with copies of what we made: the framework marks messages in place, and ours are used again.

    With ``context`` (a strategy of the framework works behind us) it is told what each of them stands for, and what the
    strategy had excluded (``given`` beside ``messages``) stays at its place: it goes by those marks.
    """
    places = {id(m): k for k, m in enumerate(messages)}
    found: list[Message] = []
    made: list[Message] = []
    behind = 0
    excluded = iter(given) if context is not None else iter(())

    def gap_ends(upto: int) -> None:
        if context is not None and upto > behind:
            for message in made:
                context.record_message_replacement(message, messages[behind:upto])
        made.clear()

    for message in view:
        place = places.get(id(message))
        if place is not None:
            gap_ends(place)
            behind = place + 1
            for other in excluded:
                if other is message:
                    break
                if id(other) not in places:
                    found.append(other)
        else:
            message = copy.copy(message)
            message.additional_properties = dict(message.additional_properties)
            made.append(message)
        found.append(message)
    gap_ends(len(messages))
    return [*found, *(m for m in excluded if id(m) not in places)]


def _views(session: AgentSession | None, name: str) -> list[str]:
    """What a session's state carries under our key; nothing where it is not of ours."""
    held = session.state.get(STATE_KEY) if session is not None else None
    views = held.get("views") if isinstance(held, Mapping) and held.get("v") == STATE_VERSION else None
    texts = views.get(name) if isinstance(views, Mapping) else None
    return [t for t in texts if isinstance(t, str)] if isinstance(texts, list | tuple) else []

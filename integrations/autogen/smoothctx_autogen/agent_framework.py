"""Microsoft Agent Framework: a chat middleware that sends the model the view, and leaves the stored history raw.

    agent = Agent(client=client, middleware=[LookaheadMiddleware(runtime, policy)])

It runs once per model call, inside the tool loop as well. Its decision travels in the ``AgentSession``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

try:
    from agent_framework import (
        EXCLUDED_KEY,
        AgentSession,
        ChatContext,
        ChatMiddleware,
        ChatResponse,
        Message,
        ResponseStream,
    )
except ImportError as error:
    raise ImportError(
        "smoothctx_autogen.agent_framework needs agent-framework-core: pip install 'smoothctx[agent-framework]'"
    ) from error

from smoothctx import Policy, Runtime, Session
from smoothctx.digest import ROOT, link
from smoothctx.errors import ClosedError, ConfigurationError, MessageError
from smoothctx.lines import Lines

from .agent_framework_codec import AgentFrameworkMessages
from .agent_framework_model import ChatClientModel, background, in_background
from .agent_framework_request import request_of
from .agent_framework_turn import Turn
from .checks import RawTurns, check_engine, check_policy, check_request, check_runtime, check_text, guarded, warn

__all__ = ["STATE_KEY", "AgentFrameworkMessages", "ChatClientModel", "LookaheadMiddleware", "background"]

#: where an ``AgentSession``'s state carries what is committed
STATE_KEY = "smoothctx"
#: version of what stands under it
STATE_VERSION = 1

LOADED_BEHIND = "the history is loaded behind this middleware (require_per_service_call_history_persistence)"

#: what is at work in each chain of middleware that is under way
_working: weakref.WeakKeyDictionary[ChatContext, list[LookaheadMiddleware]] = weakref.WeakKeyDictionary()


class LookaheadMiddleware(ChatMiddleware):
    """Rewrites what the model is sent, ahead of time; the history that the framework stores is never touched.

    One instance may serve any number of agents, sessions and runs at once. A conversation is known by its
    ``AgentSession`` and its messages: a copied or edited session is a branch of its own. Without a session the
    messages alone tell. What is committed is kept in ``session.state["smoothctx"]``, as JSON, and used again in the
    process that loads the session next, if the summariser has an identity.

    Where the service stores the history, the messages are only the newest ones: such calls pass, and each instance says
    it once per reason (event ``history.elsewhere`` and a warning of the logger ``smoothctx.agent_framework``). So do
    calls when the runtime was closed (event ``turn.raw``, once per instance, and a warning).

    In effect twice on one call (on the client and on the agent, say) with the same runtime, policy and tenant, the
    inner one does nothing.

    Args:
        runtime: an open runtime.
        policy: what happens to the context. Instructions and tool schemas are no messages: count them in
            ``reserved_tokens``, unless the client reports its usage.
        name: tells this middleware's part of a session from another's, where agents with policies of their own share
            sessions.
        tenant: whose conversations these are.
        engine: the agent's own engine, to preload views (see ``Runtime.session``) and to keep out of its calls' way.
        request: the constant part of the agent's requests, where more is known of it than its instructions and tools,
            which are seen with each call.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
        ClosedError: at the first call, where the runtime was never opened.
    """

    def __init__(
        self,
        runtime: Runtime,
        policy: Policy,
        *,
        name: str = "agent",
        tenant: str = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        check_runtime(runtime)
        check_policy(policy)
        check_text("name", name)
        check_text("tenant", tenant)
        check_engine(engine)
        check_request(request)
        self.name = name
        self._runtime, self._policy, self._tenant = runtime, policy, tenant
        self._codec = AgentFrameworkMessages()
        self._given = dict(request or {})
        self._lines = Lines(runtime, policy=policy, codec=self._codec, tenant=tenant, engine=engine, request=request)
        # what a session's state is known to hold: it is read and written only where that changes
        self._known: weakref.WeakKeyDictionary[Session, list[str]] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()
        self._raw = RawTurns("agent_framework")
        # sessions whose state holds something under our key that we cannot read, and of which that was said
        self._unread: weakref.WeakSet[AgentSession] = weakref.WeakSet()
        # what these are given here is only the newest: something behind us puts the history before it, and stores it
        self._loaded_behind: weakref.WeakSet[AgentSession] = weakref.WeakSet()

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        """One model call: the view in place of the messages, the call, and what it answered."""
        working = _working.setdefault(context, [])
        if in_background() or any(self._like(other) for other in working):
            await call_next()
            return
        working.append(self)
        try:
            await self._process(context, call_next)
        finally:
            working.remove(self)

    async def _process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        turn = await self._begin(context)
        if turn is None:
            await call_next()
            return
        try:
            await call_next()
            with guarded(self._failed):  # the caller has its answer
                if context.session is not None and turn.got_history(context.messages):
                    self._loaded_behind.add(context.session)
                if isinstance(context.result, ResponseStream):
                    turn.follow(context)
                elif isinstance(context.result, ChatResponse):
                    turn.answered(context.result)
        finally:
            if not turn.streams:
                turn.end()

    def sessions(self, session: AgentSession) -> list[Session]:
        """The open smoothctx sessions of an agent session, the one used last at the end: receipts, handles, pins.

        Raises:
            ConfigurationError: it is no ``AgentSession``.
        """
        _check_session(session)
        return self._lines.sessions(self._bucket(session))

    async def forget(self, session: AgentSession) -> None:
        """Cancel what is prepared for this agent session and forget what was committed, also in its state.

        Raises:
            ConfigurationError: it is no ``AgentSession``.
        """
        _check_session(session)
        await self._lines.close(self._bucket(session))
        held = session.state.get(STATE_KEY)
        views = held.get("views") if isinstance(held, Mapping) else None
        rest = {k: v for k, v in views.items() if k != self.name} if isinstance(views, Mapping) else {}
        if rest:
            session.state[STATE_KEY] = {"v": STATE_VERSION, "views": rest}
        else:
            session.state.pop(STATE_KEY, None)

    # -- one call --------------------------------------------------------------------------------------------

    async def _begin(self, context: ChatContext) -> Turn | None:
        """Make the view. ``None`` where there is none: the call goes on with the messages it had."""
        turn = Turn(self._codec, self._failed)
        try:
            why = _elsewhere(context)
            if why is None and context.session is not None and context.session in self._loaded_behind:
                why = LOADED_BEHIND
            if why is not None:
                self._say(why)
                return None
            given = messages = list(context.messages)
            compacts = _compacts(context)
            if compacts:  # what its strategy left out before is not sent, and so is no part of the view
                messages = [m for m in given if m.additional_properties.get(EXCLUDED_KEY) is not True]
            session = turn.enter(self._lines, self._bucket(context.session, messages), messages)
            self._restore(context.session, session)
            self._ask(session, context)
            view = await session.commit(messages)
            self._save(context.session, session)
            turn.call_begins()
            turn.view = context.messages = _own(view, messages, given, context if compacts else None)
            return turn
        except ClosedError as error:
            turn.end()
            self._raw.refused(error, self._runtime)
            return None
        except Exception as error:
            turn.end()
            self._failed(error)
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

    def _ask(self, session: Session, context: ChatContext) -> None:
        """Let the session know what the agent sends beside its messages, where an engine is to be warmed with it."""
        if session.engine is None:
            return
        try:
            request = request_of(context.options, self._given)
        except Exception as error:
            if self._policy.preload_kv is not False:
                why = f"nothing is preloaded, since what this agent sends cannot be told: {error}"
                self._say(why, "request.unread")
            request = None
        session.use_request(request)

    def _like(self, other: LookaheadMiddleware) -> bool:
        """Would this one only do again what the other does?"""
        return other is self or (
            other._runtime is self._runtime and other._tenant == self._tenant and other._policy.same_as(self._policy)
        )

    def _restore(self, held: AgentSession | None, session: Session) -> None:
        if held is not None and held not in self._unread and not _readable(held.state.get(STATE_KEY)):
            self._unread.add(held)
            error = MessageError(f"state[{STATE_KEY!r}]: expected what version {STATE_VERSION} of it holds")
            self._runtime.events.error(error, where="agent_framework.restore", tenant=self._tenant)
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

    def _failed(self, error: Exception) -> None:
        self._runtime.events.error(error, where="agent_framework", tenant=self._tenant)

    def _say(self, why: str, event: str = "history.elsewhere") -> None:
        if why not in self._said:
            self._said.add(why)
            self._runtime.events.emit(event, why=why)
            about = "LookaheadMiddleware leaves this agent's context alone: " if event == "history.elsewhere" else ""
            warn("agent_framework", about + why)

    def __repr__(self) -> str:
        return f"LookaheadMiddleware(name={self.name!r})"


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


def _check_session(session: Any) -> None:
    if not isinstance(session, AgentSession):
        raise ConfigurationError(f"session={session!r}: expected an AgentSession")


def _readable(held: Any) -> bool:
    """Is this nothing, or something that was written under our key?"""
    if held is None:
        return True
    views = held.get("views") if isinstance(held, Mapping) and held.get("v") == STATE_VERSION else None
    return isinstance(views, Mapping) and all(
        isinstance(texts, list | tuple) and all(isinstance(t, str) for t in texts) for texts in views.values()
    )


def _views(session: AgentSession | None, name: str) -> list[str]:
    """What a session's state carries under our key; nothing where it is not of ours."""
    held = session.state.get(STATE_KEY) if session is not None else None
    views = held.get("views") if isinstance(held, Mapping) and held.get("v") == STATE_VERSION else None
    texts = views.get(name) if isinstance(views, Mapping) else None
    return [t for t in texts if isinstance(t, str)] if isinstance(texts, list | tuple) else []

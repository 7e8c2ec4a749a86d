"""AG2 classic (``import autogen``): lookahead on an agent's message hook.

with Runtime.in_thread() as runtime:
    attached = attach(agent, runtime, policy)
    user.initiate_chat(agent, message="...")
"""

from __future__ import annotations

from .ag2_missing import missing

try:
    from autogen import ConversableAgent
except ImportError as error:
    raise missing("autogen") from error

import asyncio
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from smoothctx.errors import ClosedError, ConfigurationError
from smoothctx.lines import Lines
from smoothctx.policy import Policy
from smoothctx.runtime import Runtime
from smoothctx.session import Session
from smoothctx.states import Reason

from .ag2_classic_messages import ClassicMessages
from .ag2_classic_model import WrapperModel
from .checks import RawTurns, check_engine, check_policy, check_request, check_runtime, check_text, saved_texts

__all__ = ["Attached", "ClassicMessages", "WrapperModel", "attach"]

#: with so many others the names of those whose sessions are closed are dropped
MAX_OTHERS = 1024
_BEFORE_REPLY = "process_all_messages_before_reply"
_BEFORE_SEND = "process_message_before_send"


def attach(
    agent: Any,
    runtime: Runtime,
    policy: Policy,
    *,
    name: str | None = None,
    tenant: str = "default",
    engine: Any = None,
    request: Mapping[str, Any] | None = None,
) -> Attached:
    """Let an agent read the view: rewrites of its context are prepared beside the chat and swapped in between turns.

    The hook is synchronous and works in sync chats, async chats and group chats. The agent's stored messages stay as
    they are. Below the hard limit it never waits. At the hard limit a sync chat waits for the lookahead, up to the
    policy's ``max_wait``; an async chat cannot (the hook runs on the event loop's thread), so it takes the policy's
    local fallback at once, which the lookahead supersedes when it is ready.

    Clearing the agent's history (``clear_history``, ``reset``, a new ``initiate_chat``) cancels and forgets. A runtime
    that was closed leaves the messages as they are, and says so once (event ``turn.raw``, and a warning of the logger
    ``smoothctx.ag2_classic``). One that was never opened is a ``ClosedError`` of the agent's first reply.

    Args:
        agent: a ``ConversableAgent``; attach to each agent of a group chat that is to have a view of its own.
        runtime: ``Runtime.in_thread()`` for sync chats; in async chats it may also run on the chat's own loop.
        policy: what the agent does with its context.
        name: names the agent's conversations in the store, alike in every process; by default the agent's name.
        tenant: whose conversations they are.
        engine: the agent's own engine, to preload views (see ``Runtime.session``).
        request: the constant part of the agent's requests.

    Raises:
        ConfigurationError: wrong values, or ``agent`` has smoothctx attached already.
    """
    return Attached(agent, runtime, policy, name=name, tenant=tenant, engine=engine, request=request)


@final
class Attached:
    """What :func:`attach` put on an agent. :meth:`detach` takes it off again."""

    def __init__(
        self,
        agent: Any,
        runtime: Runtime,
        policy: Policy,
        *,
        name: str | None,
        tenant: str,
        engine: Any,
        request: Mapping[str, Any] | None,
    ) -> None:
        if not isinstance(agent, ConversableAgent):
            raise ConfigurationError(f"agent={agent!r}: expected a ConversableAgent of AG2 classic")
        check_runtime(runtime)
        check_policy(policy)
        check_text("name", name, optional=True)
        check_text("tenant", tenant)
        check_engine(engine)
        check_request(request)
        if any(isinstance(getattr(h, "__self__", None), Attached) for h in agent.hook_lists[_BEFORE_REPLY]):
            raise ConfigurationError(f"agent={agent.name!r}: attached already; detach() it first")
        self.agent = agent
        self._runtime = runtime
        self._name = name or str(agent.name)
        self._tenant = tenant
        self._lines = Lines(
            runtime, policy=policy, codec=ClassicMessages(), tenant=tenant, engine=engine, request=request
        )
        self._lock = threading.Lock()
        self._others: set[str] = set()  # whom the agent talks with
        self._saved: list[str] = []
        self._met: weakref.WeakSet[Session] = weakref.WeakSet()  # those that were given what was saved
        self._turns: weakref.WeakKeyDictionary[Any, tuple[Session, list[Any]]] = weakref.WeakKeyDictionary()
        self._raw = RawTurns("ag2_classic")
        self._hooks = {_BEFORE_REPLY: self._before_reply, _BEFORE_SEND: self._before_send}
        for point, hook in self._hooks.items():
            agent.register_hook(point, hook)
        # There are no hooks for these. Whoever clears a history wants what was made of it gone as well, and a turn is
        # over with its reply, also where that failed or is sent to nobody.
        self._around = {
            "clear_history": self._cleared,
            "generate_reply": self._generate_reply,
            "a_generate_reply": self._a_generate_reply,
        }
        self._own = {name: getattr(agent, name) for name in self._around}
        for name, wrapper in self._around.items():
            setattr(agent, name, wrapper)

    def detach(self) -> None:
        """Take the hooks off and end the agent's sessions. Detaching twice is fine."""
        for point, hook in self._hooks.items():
            if hook in self.agent.hook_lists[point]:
                self.agent.hook_lists[point].remove(hook)
        for name, wrapper in self._around.items():
            if self.agent.__dict__.get(name) == wrapper:
                delattr(self.agent, name)
        self.forget()

    def sessions(self) -> list[Session]:
        """The agent's open sessions, the one used last at the end."""
        with self._lock:
            others = list(self._others)
        found = [s for name in others for s in self._lines.sessions(self._bucket(name), tenant=self._tenant)]
        return sorted(found, key=lambda s: s.used_at)

    def forget(self, other: Any = None) -> None:
        """Cancel the lookaheads of the chat with ``other`` (of all chats, without one) and forget what they made."""
        with self._lock:
            # Whom a chat was with is not always known: in doubt it is forgotten too.
            names = list(self._others) if other is None else [str(other.name), ""]
            if other is None:
                self._saved = []
        for name in names:
            for session in self._lines.sessions(self._bucket(name), tenant=self._tenant):
                session.close_now(Reason.SESSION_CLOSED)

    def saved(self) -> list[str]:
        """What is committed in the agent's views, as JSON texts to keep beside its exported ``chat_messages``."""
        return [text for session in self.sessions() for text in session.saved()]

    def restore(self, saved: Iterable[str]) -> None:
        """Take over what :meth:`saved` gave in another process; it applies where the messages are the same.

        A text that cannot be read is an event.

        Raises:
            ConfigurationError: ``saved`` is no collection of texts.
        """
        texts = saved_texts(saved, self._runtime, where="ag2_classic.restore", tenant=self._tenant)
        with self._lock:
            self._saved += texts
            self._met.clear()

    # -- the hooks -----------------------------------------------------------------------------------------------

    def _before_reply(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The view of ``messages``, in a new list. It only raises where the runtime was never opened."""
        try:
            return self._view(messages)
        except ClosedError as error:
            self._raw.refused(error, self._runtime)
        except Exception as error:
            self._error(error)
        return list(messages)

    def _view(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        held = list(messages)  # ours to hand on: the agent appends to its own
        other = self._other(messages)
        with self._lines.using(self._bucket(other), held) as session:
            self._meet(other, session)
            loop = _loop()
            view = session.commit_sync(held) if loop is None else session.commit_now(held)
        with self._lock:
            self._turns[_runner(loop)] = (session, held)
        return view

    def _before_send(self, sender: Any, message: Any, recipient: Any, silent: bool) -> Any:
        """The reply is there: background work has the engine for itself again."""
        self._over()
        return message

    def _generate_reply(self, *args: Any, **kwargs: Any) -> Any:
        """As ``generate_reply``; the turn is over with it."""
        with self._replying():
            return self._own["generate_reply"](*args, **kwargs)

    async def _a_generate_reply(self, *args: Any, **kwargs: Any) -> Any:
        """As ``a_generate_reply``; the turn is over with it."""
        with self._replying():
            return await self._own["a_generate_reply"](*args, **kwargs)

    @contextmanager
    def _replying(self) -> Iterator[None]:
        """A reply of the agent, perhaps inside another one, whose turn goes on afterwards."""
        runner = _runner(_loop())
        with self._lock:
            outer = self._turns.pop(runner, None)
        try:
            yield
        finally:
            self._over()
            if outer is not None:
                with self._lock:
                    self._turns[runner] = outer

    def _over(self) -> None:
        """The turn that runs here is over, if there is one."""
        try:
            with self._lock:
                turn = self._turns.pop(_runner(_loop()), None)
            if turn is not None:
                turn[0].observe(turn[1])
        except Exception as error:
            self._error(error)

    def _cleared(self, recipient: Any = None, nr_messages_to_preserve: int | None = None) -> None:
        """As ``clear_history``, and the sessions of what was cleared end."""
        self._own["clear_history"](recipient, nr_messages_to_preserve)
        self.forget(recipient)

    def _bucket(self, other: str) -> str:
        return f"{self._name}/{other}" if other else self._name

    def _other(self, messages: Any) -> str:
        """With whom the chat is that these messages are of; ``""`` where another hook made a list of its own."""
        chats = list(self.agent.chat_messages.items())  # another chat of the agent may begin in another thread
        return next((str(other.name) for other, held in chats if held is messages), "")

    def _meet(self, other: str, session: Session) -> None:
        with self._lock:
            if len(self._others) >= MAX_OTHERS and other not in self._others:
                self._others = {n for n in self._others if self._lines.sessions(self._bucket(n), tenant=self._tenant)}
            self._others.add(other)
            new = self._saved if session not in self._met else []
            self._met.add(session)
        if new:
            session.restore(new)

    def _error(self, error: Exception) -> None:
        self._runtime.events.error(error, where="ag2_classic.hook", session=self._name, tenant=self._tenant)


def _runner(loop: asyncio.AbstractEventLoop | None) -> Any:
    """What carries out this turn: hooks of one turn run in one task, or in one thread."""
    return (asyncio.current_task(loop) if loop is not None else None) or threading.current_thread()


def _loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

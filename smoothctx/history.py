"""History: what the session knows of the caller's messages, kept in step with them incrementally.

Per message it holds the frozen leaves (to notice an edit in place), the chain digest and the running token
count. Comparing is one pass in C over what is held; hashing and counting touch only new or changed messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .codec import Codec
from .digest import ROOT, link
from .errors import MessageError
from .segments import Segmenter, segment

PIN_OPEN = "<pin>"


@dataclass(slots=True)
class Change:
    """What a sync found. ``common``: messages that stayed; ``previous``: messages held before;
    ``error``: why messages from ``len(history)`` on could not be read, if so."""

    common: int
    previous: int
    error: MessageError | None = None

    @property
    def diverged(self) -> bool:
        """Something that was held is gone or different: another branch."""
        return self.common < self.previous


class History:
    """The readable part of one branch. Owns digests, counts and segments; never the messages themselves."""

    __slots__ = (
        "_count",
        "_frozen",
        "answered",
        "asked",
        "chain",
        "codec",
        "last_assistant",
        "last_user",
        "pinned",
        "reported",
        "reports_from",
        "segmenter",
        "tokens",
    )

    def __init__(self, codec: Codec, token_counter: Callable[[list[Any]], int] | None = None) -> None:
        self.codec = codec
        self._count = token_counter
        self._frozen: list[Any] = []
        self.chain: list[bytes] = [ROOT]
        #: running token count: ``tokens[i]`` is that of messages ``0..i``
        self.tokens: list[int] = [0]
        self.segmenter = Segmenter()
        self.last_user = -1
        self.last_assistant = -1
        #: indexes of messages that hold a text the user pinned
        self.pinned: list[int] = []
        #: messages of the view that a reply is awaited to, -1 without one
        self.asked = -1
        #: the context size that the provider reported with the last such reply: (messages it covers, tokens)
        self.answered: tuple[int, int] | None = None
        #: the last one reported with any message: it may be of another view, or another agent's
        self.reported: tuple[int, int] | None = None
        #: reports of earlier messages are of another view than the one that is held now
        self.reports_from = 0

    def __len__(self) -> int:
        return len(self._frozen)

    def count(self, messages: Sequence[Any]) -> int:
        """Tokens of a run of messages, by the caller's counter or the codec's estimate."""
        if self._count is None:
            return sum(map(self.codec.estimate, messages))
        return int(self._count(list(messages))) if messages else 0

    def span(self, start: int, end: int) -> int:
        """Tokens of messages ``[start, end)``."""
        return self.tokens[end] - self.tokens[start]

    def sync(self, messages: Sequence[Any], *, tail_only: bool = False) -> Change:
        """Follow the caller's list. With ``tail_only`` only its end is compared (an edit further up shows at
        the next full sync)."""
        previous = len(self._frozen)
        common = self._common(messages, tail_only)
        if common < previous:
            self._truncate(messages, common)
        return Change(common, previous, self._extend(messages))

    @property
    def frozen(self) -> Sequence[Any]:
        """The frozen form of every message."""
        return self._frozen

    def continues(self, messages: Sequence[Any], *, tail_only: bool = False) -> bool:
        """Are these messages what is held, perhaps with more behind it? With ``tail_only`` by the last held one."""
        n = len(self._frozen)
        if tail_only and len(messages) >= n and (n == 0 or self.codec.same([messages[n - 1]], [self._frozen[n - 1]])):
            return True
        return self.unchanged(messages)

    def unchanged(self, messages: Sequence[Any]) -> bool:
        """Is everything held still at the head of ``messages``?"""
        n = len(self._frozen)
        return len(messages) >= n and self.codec.same(messages if len(messages) == n else messages[:n], self._frozen)

    def shared(self, messages: Sequence[Any]) -> int:
        """How many messages at the head are what is held, by what the model sees of them."""
        codec, n = self.codec, min(len(self._frozen), len(messages))
        for i in range(n):
            message = messages[i]
            if codec.same([message], [self._frozen[i]]):
                continue
            try:
                codec.check(message, i)
            except MessageError:
                return i
            if link(self.chain[i], codec, message) != self.chain[i + 1]:
                return i
        return n

    def _common(self, messages: Sequence[Any], tail_only: bool) -> int:
        frozen, codec, n = self._frozen, self.codec, len(self._frozen)
        if self.continues(messages, tail_only=tail_only):
            return n
        for i in range(min(n, len(messages))):
            message = messages[i]
            if codec.same([message], [frozen[i]]):
                continue
            try:
                codec.check(message, i)
            except MessageError:
                return i
            if link(self.chain[i], codec, message) != self.chain[i + 1]:
                return i
            frozen[i] = codec.freeze(message)  # only bookkeeping changed: not what the model sees
        return min(n, len(messages))

    def _truncate(self, messages: Sequence[Any], n: int) -> None:
        del self._frozen[n:], self.chain[n + 1 :], self.tokens[n + 1 :]
        self.pinned = [i for i in self.pinned if i < n]
        if self.reported and self.reported[0] > n:
            self.reported = None
        if self.answered and self.answered[0] > n:
            self.answered = None
        if self.asked > n:
            self.asked = -1
        # Pairing depends on what came after, so the kept messages are segmented anew (a branch is rare).
        self.segmenter = segment(self.codec, messages[:n])
        roles = [self.codec.role(m) for m in messages[:n]]
        self.last_user = _last(roles, "user")
        self.last_assistant = _last(roles, "assistant")

    def _extend(self, messages: Sequence[Any]) -> MessageError | None:
        codec = self.codec
        for i in range(len(self._frozen), len(messages)):
            message = messages[i]
            try:
                codec.check(message, i)
            except MessageError as error:
                return error
            # What still streams ends the readable part; one that the agent has answered behind is only marked so.
            if codec.in_progress(message) and not any(_is_reply(codec, m) for m in messages[i + 1 :]):
                return None
            counted = self.count([message])
            digest = link(self.chain[i], codec, message)
            self._frozen.append(codec.freeze(message))
            self.chain.append(digest)
            self.tokens.append(self.tokens[i] + counted)
            self.segmenter.append(codec, message)
            role = codec.role(message)
            if role == "user":
                self.last_user = i
            elif role == "assistant":
                self.last_assistant = i
                used = None if self._count is not None else codec.reported(message)
                if used is not None and i >= self.reports_from:
                    self.reported = (i + 1, used)
                    if i == self.asked:
                        self.answered = (i + 1, used)
            if i == self.asked:
                self.asked = -1
            if PIN_OPEN in codec.text(message):
                self.pinned.append(i)
        return None


def _is_reply(codec: Codec, message: Any) -> bool:
    try:
        codec.check(message, 0)
    except MessageError:
        return False
    return codec.role(message) == "assistant"


def _last(roles: Sequence[str], role: str) -> int:
    return next((i for i in range(len(roles) - 1, -1, -1) if roles[i] == role), -1)

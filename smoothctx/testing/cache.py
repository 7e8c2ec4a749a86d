"""Exact models of the two kinds of prefix cache that servers have: slots, and blocks by content."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Tokens = Sequence[Hashable]

#: share of a prompt that a slot must hold for the request to go there rather than to the least recently used one
SIMILAR = 0.1


class Lane(Protocol):
    """Where one request runs: what is cached there, and what it leaves there."""

    def open(self, tokens: Tokens) -> int:
        """How many tokens at the head of this prompt are cached: whole blocks, and never the last token."""
        ...

    def keep(self, tokens: Tokens) -> None:
        """These tokens, from the first one on, have been evaluated."""
        ...


class Cache(Protocol):
    """A server's prefix cache."""

    async def take(self, tokens: Tokens, wanted: int | None) -> Lane:
        """A lane for a request, once there is one; ``wanted`` is the number of a slot."""
        ...

    def give(self, lane: Lane) -> None:
        """The request is over."""
        ...


def whole_blocks(shared: int, tokens: Tokens, block_tokens: int) -> int:
    """What of ``shared`` common tokens a server can reuse.

    The last token of a prompt is always evaluated (its output is what the first new token is drawn from), and a
    block that is not full is not shared.
    """
    return min(shared, len(tokens) - 1) // block_tokens * block_tokens


@dataclass(eq=False)
class Slot:
    """One slot: the tokens that its KV cache holds."""

    block_tokens: int
    tokens: list[Hashable] = field(default_factory=list)
    used: int = 0
    free: bool = True

    def common(self, tokens: Tokens) -> int:
        """Tokens that both begin with."""
        n = 0
        for mine, other in zip(self.tokens, tokens, strict=False):
            if mine != other:
                break
            n += 1
        return n

    def open(self, tokens: Tokens) -> int:
        """Whole blocks of what is common."""
        return whole_blocks(self.common(tokens), tokens, self.block_tokens)

    def keep(self, tokens: Tokens) -> None:
        """The slot holds this one sequence and no other: everything else goes."""
        self.tokens = list(tokens)


class SlotCache:
    """``count`` slots, each with one sequence (llama.cpp).

    A request goes to the free slot that shares the longest prefix with it, if that is more than ``SIMILAR`` of the
    prompt, else to the least recently used free one, whose content it replaces from the first difference on. If
    none is free it waits, in order of arrival.
    """

    def __init__(self, count: int, block_tokens: int) -> None:
        self.slots = [Slot(block_tokens) for _ in range(count)]
        self._waiting: list[tuple[Tokens, int | None, asyncio.Future[Slot]]] = []
        self._clock = 0

    async def take(self, tokens: Tokens, wanted: int | None) -> Slot:
        """The slot for this prompt, once it is free."""
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, wanted, future))
        self._grant()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(future.result())
            raise

    def give(self, lane: Lane) -> None:
        """The slot is free; what it holds stays."""
        assert isinstance(lane, Slot)
        lane.free = True
        self._grant()

    def _grant(self) -> None:
        left = []
        for tokens, wanted, future in self._waiting:
            if future.cancelled():
                continue
            slot = self._choose(tokens, wanted)
            if slot is None:
                left.append((tokens, wanted, future))
                continue
            self._clock += 1
            slot.free, slot.used = False, self._clock
            future.set_result(slot)
        self._waiting = left

    def _choose(self, tokens: Tokens, wanted: int | None) -> Slot | None:
        free = [s for s in self.slots if s.free]
        if wanted is not None:
            return self.slots[wanted] if self.slots[wanted].free else None
        if not free:
            return None
        best = max(free, key=lambda s: (s.common(tokens), -s.used))
        return best if best.common(tokens) > SIMILAR * len(tokens) else min(free, key=lambda s: s.used)


class BlockCache:
    """Full blocks of ``block_tokens`` tokens, found by their content and everything before them (vLLM, SGLang).

    At most ``total`` blocks stay (``None``: all), the most recently used ones; within one sequence its end goes
    first. Any number of requests runs at once.
    """

    def __init__(self, total: int | None, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._total = total
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    async def take(self, tokens: Tokens, wanted: int | None) -> BlockCache:
        """There is always room."""
        return self

    def give(self, lane: Lane) -> None:
        """Nothing to free."""

    def open(self, tokens: Tokens) -> int:
        """Blocks at the head that are there, one after the other; they count as used now."""
        keys = self._keys(tokens)
        found = next((k for k, key in enumerate(keys) if key not in self._blocks), len(keys))
        cached = whole_blocks(found * self.block_tokens, tokens, self.block_tokens)
        for key in reversed(keys[: cached // self.block_tokens]):
            self._blocks.move_to_end(key)
        return cached

    def keep(self, tokens: Tokens) -> None:
        """Every full block of these."""
        for key in reversed(self._keys(tokens)):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while self._total is not None and len(self._blocks) > self._total:
            self._blocks.popitem(last=False)

    @property
    def blocks(self) -> int:
        """Blocks that are held."""
        return len(self._blocks)

    def _keys(self, tokens: Tokens) -> list[bytes]:
        size, keys, key = self.block_tokens, [], b""
        for k in range(len(tokens) // size):
            text = repr(tokens[k * size : (k + 1) * size]).encode("utf-8", "surrogatepass")
            key = hashlib.blake2b(key + text, digest_size=16).digest()
            keys.append(key)
        return keys

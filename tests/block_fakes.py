"""What the tests of blocks share: a summariser that is held and failed block by block, and a session with blocks."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

from helpers import CODEC, MARK, A, H, Message, S, T, marks, problems, summaries
from smoothctx import ParallelSummarize, Policy, Session
from smoothctx.transforms.prompts_blocks import TARGET

OPEN, CLOSE = f"<{TARGET}>", f"</{TARGET}>"


def target_marks(messages: Sequence[Message]) -> set[int]:
    """The marks in the block that a request is about."""
    text = str(messages[-1]["content"])
    return {int(m) for m in MARK.findall(text[text.index(OPEN) : text.index(CLOSE)])}


class Blocks:
    """A summariser of blocks that writes down the marks of its target.

    ``held``: marks whose blocks wait until they are let go; ``failing``: marks whose blocks fail. ``running`` has the
    marks of the blocks under way. Every request is checked to be one that a provider accepts.
    """

    def __init__(self, *, delay: float = 1.0, held: Sequence[int] = (), failing: Sequence[int] = ()) -> None:
        self.delay = delay
        self.held = set(held)
        self.failing = set(failing)
        self.inputs: list[list[Message]] = []
        self.targets: list[set[int]] = []
        self.running: list[set[int]] = []
        self.most_running = 0
        self.faults: list[str] = []
        self.text: Callable[[set[int]], str] = lambda seen: "Record."
        self.changed = asyncio.Event()

    @property
    def calls(self) -> int:
        """How often it was asked."""
        return len(self.inputs)

    def let_go(self, *held: int) -> None:
        """Let these blocks go on; without marks, all of them."""
        self.held -= set(held) if held else set(self.held)
        self.changed.set()
        self.changed = asyncio.Event()

    async def __call__(self, messages: list[Message], *, max_tokens: int | None = None) -> str:
        self.inputs.append(copy.deepcopy(messages))
        self.faults += problems(messages)
        seen = target_marks(messages)
        self.targets.append(seen)
        self.running.append(seen)
        self.most_running = max(self.most_running, len(self.running))
        try:
            if self.delay:
                await asyncio.sleep(self.delay)
            while seen & self.held:
                await self.changed.wait()
        finally:
            self.running.remove(seen)
        if seen & self.failing:
            raise RuntimeError("the model failed")
        return f"{self.text(seen)} {''.join(f'<{m}>' for m in sorted(seen))}"


def block_policy(model: Any, *, window: int = 4000, block: int = 400, keep: int = 4, **options: Any) -> Policy:
    """Blocks of 400 tokens in a window of 4000; the last four messages stay raw."""
    names = ("detail", "total_tokens", "workers", "max_tokens", "facts", "model_id")
    own = {k: options.pop(k) for k in names if k in options}
    own = {"facts": False, "max_tokens": 100, "window": 100_000, **own}
    transform = ParallelSummarize(model, block_tokens=block, keep=("messages", keep), **own)
    return Policy(transform, context_window=window, **options)


def covered(view: Sequence[Message]) -> list[set[int]]:
    """The marks of each summary in a view, in order."""
    return [{int(m) for m in MARK.findall(t)} for t in summaries(view)]


def turn(k: int, *, size: int = 100, tools: bool = False) -> list[Message]:
    """One turn, marked with its number: about ``size`` tokens in each of its two or four messages."""
    if not tools:
        return [H(f"<{k}> question", size=size), A(f"<{k}> answer", size=size)]
    return [
        H(f"<{k}> question", size=size),
        A(f"<{k}> calling", f"c{k}"),
        T(f"c{k}", f"<{k}> result", size=size),
        A(f"<{k}> answer", size=size),
    ]


async def play(session: Session, messages: list[Message], turns: Sequence[list[Message]], settle: Any) -> list[Any]:
    """Play turns: each one's first message is committed, the rest observed; the view of the last commit."""
    view: list[Any] = []
    for new in turns:
        messages.append(new[0])
        view = await session.commit(messages)
        assert not problems(view), problems(view)
        for message in new[1:]:
            messages.append(message)
            session.observe(messages)
        await settle()
    return view


def lost(messages: Sequence[Message], view: Sequence[Message]) -> set[int]:
    """Marks of the history that are neither in a summary nor in a message of the view."""
    return marks(messages) - marks(view)


def begin() -> list[Message]:
    """A history with nothing but its system message."""
    return [S()]


def summary_tokens(view: Sequence[Message]) -> int:
    """Tokens of all summaries in a view."""
    return sum(CODEC.estimate(m) for m in view if CODEC.summary_text(m) is not None)

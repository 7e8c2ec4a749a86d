"""The strategies of ``bench ttft``: the policy of each in both modes, and the shape of its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..codec import OpenAIMessages
from ..demo.agent import ASK, SUMMARISE
from ..demo.chunks import Chunk
from ..policy import Policy
from ..transforms import Isolate, KeepRecent, Offload, Summarize
from .ttft_engine import call, opening_call, tool_result
from .ttft_plan import Settings, window

CODEC = OpenAIMessages()
_TASK = "You read source files part by part and write a short note on each part."
_SUB_AGENT = "You check the notes that another agent wrote."
_INSTRUCTION = "Name one thing that the notes above leave out."
#: where a turn has to wait; both modes
_LIMIT = ("fraction", 0.85)
#: results that stay whole, and what stays of the others
_KEEP_RESULTS, _PREVIEW_TOKENS = 1, 16


def policy(strategy: str, mode: str, settings: Settings, model: Any) -> Policy:
    """The default policy for ``"lookahead"``. In line it starts at the hard limit, so that the turn waits for it.

    ``model`` writes the summaries.
    """
    options: dict[str, Any] = {"context_window": window(strategy, settings)}
    if strategy == "offload":
        transform: Any = Offload(
            min_tokens=settings.turn_tokens // 3, keep_recent=_KEEP_RESULTS, preview_tokens=_PREVIEW_TOKENS
        )
        options["min_savings"] = 0.2  # each rewrite takes only what came since the last one
    elif strategy in ("keep-recent", "isolate"):
        transform = KeepRecent(keep=("fraction", 0.25))
    else:
        transform = Summarize(
            model, max_tokens=settings.summary_tokens, prompt=SUMMARISE, facts=False, fixed_tokens=True
        )
    if mode == "inline" and strategy != "isolate":
        options |= {"trigger": _LIMIT, "hard_limit": _LIMIT, "max_wait": 600.0, "timeout": 600.0, "preload_kv": False}
    return Policy(transform, **options)


def isolate(name: str, part: Sequence[Any]) -> Isolate:
    """Hands these messages to a sub-agent, whatever the agent's own view is by then. ``name`` makes its prefix its own:
    the same text of another cell may be in the server's cache."""
    return Isolate(system=f"{name}\n{_SUB_AGENT}", instruction=_INSTRUCTION, select=lambda shown: list(part))


@dataclass(slots=True)
class Conversation:
    """One agent's messages. With ``tools`` the texts are results of calls, else the user's."""

    name: str
    tools: bool
    messages: list[Any] = field(default_factory=list)
    _reads: int = 1

    def __post_init__(self) -> None:
        self.messages.append(CODEC.system(f"{self.name}\n{_TASK}"))
        if self.tools:
            self.messages += opening_call("Read all parts, one after the other, and note what each is about.")

    def ask(self, chunk: Chunk) -> None:
        """The next part is there: a turn begins."""
        text = ASK.format(file=chunk.file, text=chunk.text)
        self.messages.append(tool_result(self._reads, text) if self.tools else CODEC.user(text))

    def answer(self, reply: dict[str, Any]) -> None:
        """The model has answered; with ``tools`` it asks for the next part."""
        if self.tools:
            self._reads += 1
            reply = {**reply, "tool_calls": [call(self._reads)]}
        self.messages.append(reply)


def sent(view: Sequence[Any]) -> list[dict[str, Any]]:
    """The view as a server reads it."""
    return [CODEC.to_openai(m) for m in view]

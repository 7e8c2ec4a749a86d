"""The engine saturated by foreground work: a closed loop of ordinary turns, with smoothctx and without."""

from __future__ import annotations

from itertools import cycle, islice

from .ttft_agent import Agent, Pools
from .ttft_strategies import Conversation

#: just below the default policy's trigger, and its trigger and hard limit, in parts of the window
_BELOW, _TRIGGER, _LIMIT = 0.57, 0.60, 0.85


class Crowd(Agent):
    """An agent without tool time. Each of its conversations begins with a history just below the trigger, goes on with
    small turns, and ends before the hard limit: a lookahead is wanted all the time, and no turn needs one."""

    async def work(self, pools: Pools) -> None:
        """One conversation after the other."""
        settings, begun = self.settings, self.clock()
        small = cycle(pools.small)
        turn_tokens = settings.saturated_turn_tokens + settings.reply_tokens + 8
        turns = max(2, int((_LIMIT - _TRIGGER) * settings.window * 0.8 / turn_tokens))
        number = 0
        for part in range(settings.saturated_rounds):
            name = f"{self.line.name}/{part}"
            talk = Conversation(name, tools=False)
            tokens = 48
            at = (self.line.number * settings.saturated_rounds + part) * 5
            for chunks in (pools.turns, pools.small):  # large ones, and small ones where these are too large
                for chunk in islice(cycle(chunks), at, at + 64):
                    if tokens + chunk.tokens + 16 > _BELOW * settings.window:
                        break
                    tokens += chunk.tokens + 16
                    talk.ask(chunk)
                    talk.answer({"role": "assistant", "content": "Noted."})
            session, options = (None, self.own(self.place)) if self.cell.mode == "off" else self.session(name)
            for k in range(turns + 1):
                number += 1
                chunk = next(small)
                talk.ask(chunk)
                kind = "turn" if k else "opening"  # which evaluates the whole history
                reply, turn = await self.turn(
                    number, session, talk.messages, options, kind=kind, new_tokens=chunk.tokens
                )
                talk.answer(reply)
                if session is not None:
                    session.observe(talk.messages)
                self.measured(turn)
            if session is not None:
                await session.close()
        self.line.wall_s = self.clock() - begun

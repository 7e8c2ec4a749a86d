"""Slot table: which of a llama.cpp server's slots are whose, and what was learned of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A slot that whoever needs one may have."""

    slot: int


class SlotTable:
    """Which slots of a server are whose. A session that gets none is served wherever the server likes. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._offers: list[Offer] = []
        self._lock = threading.Lock()
        #: is a copied slot of use for a prompt that leaves it before its end? (Not with a sliding window of attention:
        #: what lies before that is not copied.) ``None``: not seen yet
        self.copies_keep: bool | None = None
        #: copies in a row to which an agent could not go, or went for nothing
        self.strays = 0
        #: copies in a row that took too long
        self.hung = 0
        #: sessions that are open
        self.sessions = 0

    def opened(self, change: int) -> None:
        """So many more sessions are open now."""
        with self._lock:
            self.sessions += change

    def take(self) -> int | None:
        """A free slot, else the one that was offered first; ``None`` when all are taken."""
        with self._lock:
            if self._free:
                return self._free.pop(0)
            return self._offers.pop(0).slot if self._offers else None

    def give(self, slot: int | None) -> None:
        """Hand a slot back."""
        with self._lock:
            if slot is not None and slot not in self._free:
                self._free.append(slot)
                self._free.sort()

    def offer(self, slot: int) -> Offer:
        """Whoever needs a slot when none is free may have this one, until it is reclaimed."""
        offer = Offer(slot)
        with self._lock:
            self._offers.append(offer)
        return offer

    def reclaim(self, offer: Offer) -> int | None:
        """Take back a slot that was offered; ``None`` when another has it."""
        with self._lock:
            if offer not in self._offers:
                return None
            self._offers.remove(offer)
            return offer.slot

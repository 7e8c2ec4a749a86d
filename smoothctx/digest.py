"""Digests: of what the model sees of one message, and the chain over a prefix of a history.

A boundary in a history is named by its chain digest, never by a count, an index, a time or an object identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from .codec import Codec

#: Bytes of a digest. 128 bits: collisions are out of reach, and held once per message.
SIZE = 16
#: The chain digest of the empty prefix.
ROOT = bytes(SIZE)


def link(chain: bytes, codec: Codec, message: Any) -> bytes:
    """The chain digest after ``message``, given the one before it."""
    return hashlib.blake2b(codec.visible(message), digest_size=SIZE, key=chain).digest()


def chain(codec: Codec, messages: Iterable[Any], start: bytes = ROOT) -> list[bytes]:
    """Chain digests after each message, ``start`` first: ``len(messages) + 1`` of them."""
    digests = [start]
    for message in messages:
        digests.append(link(digests[-1], codec, message))
    return digests

"""Estimated token counts, erring high: one per CJK character, one per four others, a fixed cost per media part."""

from __future__ import annotations

import re

#: tokens charged for the frame of a message (role, delimiters)
MESSAGE_TOKENS = 4
#: tokens charged for an image, audio or file part, whatever its bytes
MEDIA_TOKENS = 1024

# CJK ideographs, kana, hangul, their punctuation and full-width forms, and the supplementary ideographic planes.
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\u303f\u3040-\u30ff\u3100-\u318f\u31a0-\u31bf\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"
)


def count_text(text: str) -> int:
    """Estimated tokens of a text. A ``data:`` URL counts as one media part."""
    if not text:
        return 0
    if text.isascii():
        if len(text) > 512 and text.startswith("data:"):
            return MEDIA_TOKENS
        return -(-len(text) // 4)
    cjk = len(_CJK.findall(text))
    return cjk + -(-(len(text) - cjk) // 4)

"""The doctor: is this server, and are these prompts, fit for lookahead? Answered by measuring them.

``examine`` does the work; ``smoothctx doctor URL`` is its command line.
"""

from __future__ import annotations

from .examine import Examination, Settings, examine
from .findings import Finding, Status

__all__ = ("Examination", "Finding", "Settings", "Status", "examine")

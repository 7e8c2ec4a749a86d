"""smoothctx: context rewrites of long-running LLM agents, done ahead of time.

from smoothctx import Policy, Runtime, Summarize

async with Runtime() as runtime:
    session = runtime.session("user-42", policy=Policy(Summarize(model), context_window=32_000))
    context = await session.commit(messages)    # turn boundary: what to send to the model
    messages.append(await call_model(context))
    session.observe(messages)                   # segment boundary: returns at once
"""

from __future__ import annotations

from .codec import Codec, OpenAIMessages, ToolCall
from .errors import (
    ClosedError,
    ConfigurationError,
    EngineError,
    EngineOverloaded,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
    HandleError,
    HandleNotReady,
    InvalidOutput,
    MessageError,
    SmoothctxError,
    StaleHandle,
    StoreError,
    TransformError,
)
from .events import Event
from .flight import Executor
from .handle import LookaheadHandle
from .policy import Finish, Immediate, Policy, Salvage
from .receipts import Receipt
from .runtime import Runtime
from .segments import Segment, segments
from .session import Session
from .shelf import BranchInfo
from .states import HandleState, Reason
from .store import Store
from .stores import FolderStore, MemoryStore
from .transforms import Chain, Isolate, KeepRecent, Offload, ParallelSummarize, Summarize, pin
from .transforms.base import Locality, Rewrite, Transform, TransformRequest
from .usage import Counters, Usage
from .view import Artifact, Edit, Replacement

__version__ = "0.1.0"

__all__ = (
    "Artifact",
    "BranchInfo",
    "Chain",
    "ClosedError",
    "Codec",
    "ConfigurationError",
    "Counters",
    "Edit",
    "EngineError",
    "EngineOverloaded",
    "EngineProtocolError",
    "EngineRefused",
    "EngineUnreachable",
    "Event",
    "Executor",
    "Finish",
    "FolderStore",
    "HandleError",
    "HandleNotReady",
    "HandleState",
    "Immediate",
    "InvalidOutput",
    "Isolate",
    "KeepRecent",
    "Locality",
    "LookaheadHandle",
    "MemoryStore",
    "MessageError",
    "Offload",
    "OpenAIMessages",
    "ParallelSummarize",
    "Policy",
    "Reason",
    "Receipt",
    "Replacement",
    "Rewrite",
    "Runtime",
    "Salvage",
    "Segment",
    "Session",
    "SmoothctxError",
    "StaleHandle",
    "Store",
    "StoreError",
    "Summarize",
    "ToolCall",
    "Transform",
    "TransformError",
    "TransformRequest",
    "Usage",
    "pin",
    "segments",
)

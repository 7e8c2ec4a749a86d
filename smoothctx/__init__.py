"""smoothctx: context rewrites of long-running LLM agents, done ahead of time.

from smoothctx import Policy, Runtime, Summarize

async with Runtime() as runtime:
    session = runtime.session("user-42", policy=Policy(Summarize(model), context_window=32_000))
    context = await session.commit(messages)    # turn boundary: what to send to the model
    messages.append(await call_model(context))
    session.observe(messages)                   # segment boundary: returns at once
"""

from __future__ import annotations

from .admission import AdmitAll
from .codec import Codec, OpenAIMessages, ToolCall
from .economics import Expected, LatencyBound, Prices, Speed, latency_bound
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
from .judge import TrajectoryJudge
from .outcomes import CommitOutcome, ForegroundSeen
from .policy import Finish, Immediate, Policy, Salvage
from .receipts import Receipt
from .rules import BreakEven, KStepOff
from .runtime import Runtime
from .segments import Segment, segments
from .session import Session
from .shelf import BranchInfo
from .states import HandleState, Reason
from .store import Store
from .stores import FolderStore, MemoryStore
from .transforms import (
    Candidate,
    Chain,
    Isolate,
    KeepRecent,
    Offload,
    ParallelSummarize,
    Speculate,
    Summarize,
    pin,
)
from .transforms.base import Locality, Rewrite, Transform, TransformRequest
from .usage import Counters, Usage
from .view import Artifact, Edit, Replacement

__version__ = "0.1.0"

__all__ = (
    "AdmitAll",
    "Artifact",
    "BranchInfo",
    "BreakEven",
    "Candidate",
    "Chain",
    "ClosedError",
    "Codec",
    "CommitOutcome",
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
    "Expected",
    "Finish",
    "FolderStore",
    "ForegroundSeen",
    "HandleError",
    "HandleNotReady",
    "HandleState",
    "Immediate",
    "InvalidOutput",
    "Isolate",
    "KStepOff",
    "KeepRecent",
    "LatencyBound",
    "Locality",
    "LookaheadHandle",
    "MemoryStore",
    "MessageError",
    "Offload",
    "OpenAIMessages",
    "ParallelSummarize",
    "Policy",
    "Prices",
    "Reason",
    "Receipt",
    "Replacement",
    "Rewrite",
    "Runtime",
    "Salvage",
    "Segment",
    "Session",
    "SmoothctxError",
    "Speculate",
    "Speed",
    "StaleHandle",
    "Store",
    "StoreError",
    "Summarize",
    "ToolCall",
    "TrajectoryJudge",
    "Transform",
    "TransformError",
    "TransformRequest",
    "Usage",
    "latency_bound",
    "pin",
    "segments",
)

"""Flavours: which server answers at a URL, and what it can do beyond the OpenAI API.

Everything is asked, nothing assumed: a step that fails, hangs or answers nonsense means "not supported".
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio
import httpx

from ..errors import EngineError, EngineUnreachable
from .load import cache_config, read_load
from .wire import Answer, dicts, read_usage

if TYPE_CHECKING:
    from .client import OpenAIEngine

Flavour = Literal["vllm", "sglang", "llama.cpp", "hosted", "unknown"]
Level = Literal["foreground", "promoted", "lookahead"]

#: what tells the servers apart
_PATHS = ("/version", "/props", "/get_server_info", "/server_info", "/metrics", "/v1/models", "/slots")
#: the part of the time that these may take
_FIRST = 0.6
#: a server that still loads its model, or a proxy in front of one
_NOT_READY = (502, 503, 504)
#: how far behind the foreground's each level stands. SGLang preempts where the difference is above 10 (its default)
_RANKS: Mapping[Level, int] = {"foreground": 0, "promoted": 1, "lookahead": 20}
_OWNERS: Mapping[str, Flavour] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_PREFIXES: Mapping[str, Flavour] = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llama.cpp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do, as far as it said so.

    Attributes:
        flavour: ``"vllm"``, ``"sglang"``, ``"llama.cpp"``, ``"hosted"`` (a public address that is none of these) or
            ``"unknown"``.
        version: as the server calls it.
        context_window: tokens of one request, prompt and answer together.
        priority: whether ``"lower"`` or ``"higher"`` numbers go first; ``None`` where a request's priority is
            refused, or known to be ignored.
        priority_sure: its own configuration says that it sorts by them. vLLM shows that in its developer mode only,
            and without its flag some versions (0.32) take a priority and ignore it.
        preload: warming its prefix cache ahead of a commit can help, and costs no money.
        slots: llama.cpp's slots, 0 elsewhere.
        metrics: it shows its load.
        cached_tokens: its usage tells how much of a prompt was cached; ``None`` until an answer has shown it.
        tokenize: it counts tokens for us.
        cache_salt: it keeps the cached prefixes of different salts apart.
        block_size: tokens of a block of its cache, where told: only whole blocks are reused.
        prefix_caching: whether it is switched on, where told.
        unanswered: the steps that got no answer in time.
    """

    flavour: Flavour = "unknown"
    version: str | None = None
    context_window: int | None = None
    priority: Literal["lower", "higher"] | None = None
    priority_sure: bool = False
    preload: bool = False
    slots: int = 0
    metrics: bool = False
    cached_tokens: bool | None = None
    tokenize: bool = False
    cache_salt: bool = False
    block_size: int | None = None
    prefix_caching: bool | None = None
    unanswered: tuple[str, ...] = ()

    @property
    def slotted(self) -> bool:
        """Has it slots to work in beside an agent's own?"""
        return self.slots >= 2

    def priority_options(self, level: Level) -> dict[str, int]:
        """The request option for this level of ``foreground > promoted > lookahead``; nothing where unsupported."""
        if self.priority is None or (self.flavour == "vllm" and level == "foreground"):
            return {}  # vLLM: 0 is what a request without one has; SGLang puts such a request last
        return {"priority": _RANKS[level] * (1 if self.priority == "lower" else -1)}


@dataclass(slots=True)
class _Found:
    """What the server said so far."""

    answers: dict[str, Answer] = field(default_factory=dict)
    errors: list[EngineError] = field(default_factory=list)
    pending: set[str] = field(default_factory=set)

    def json(self, path: str) -> dict[str, Any]:
        """The JSON object at a path, empty where there is none."""
        answer = self.answers.get(path)
        value = answer.json() if answer is not None and answer.status == 200 else None
        return value if isinstance(value, dict) else {}

    def text(self, path: str) -> str:
        """The text at a path, empty where there is none."""
        answer = self.answers.get(path)
        return answer.text if answer is not None and answer.status == 200 else ""


async def probe(engine: OpenAIEngine, timeout_s: float) -> Capabilities:
    """Find out what the server behind ``engine`` is and can do, within ``timeout_s`` seconds.

    Raises:
        EngineUnreachable: when no server is there, or it is not ready.
        ClosedError: when the engine was closed.
    """
    found = _Found()
    with anyio.move_on_after(timeout_s):
        with anyio.move_on_after(timeout_s * _FIRST):
            asked = {path: partial(engine.fetch, path) for path in _PATHS}
            asked["/server_info"] = partial(engine.fetch, "/server_info?config_format=json")  # vLLM's in dev mode
            await _each(engine, found, asked)
        if not found.answers and found.errors and len(found.errors) == len(_PATHS):
            raise found.errors[0]
        if found.answers and all(answer.status in _NOT_READY for answer in found.answers.values()):
            raise EngineUnreachable(f"{engine.root}: not ready (every answer has status 502, 503 or 504)")
        flavour = _flavour(found, engine.root)
        if flavour in ("vllm", "sglang", "llama.cpp"):
            posts: dict[str, Mapping[str, Any]] = {
                "/tokenize": {"model": engine.model, "prompt": "a", "content": "a"},
            }
            if flavour == "vllm" or _sglang(found).get("enable_priority_scheduling") is True:
                posts["priority"] = {
                    "model": engine.model,
                    "messages": [{"role": "user", "content": "."}],
                    "max_tokens": 1,
                    "priority": 1,
                }
            calls = {
                name: partial(engine.send, "/v1/chat/completions" if name == "priority" else name, body)
                for name, body in posts.items()
            }
            await _each(engine, found, calls)
    return _read(found, engine)


async def _each(engine: OpenAIEngine, found: _Found, calls: Mapping[str, Any]) -> None:
    """Make all these calls at once; what fails is missing."""

    async def one(name: str, call: Any) -> None:
        try:
            found.answers[name] = await call()
        except EngineUnreachable as error:
            found.errors.append(error)
        except EngineError:
            pass
        found.pending.discard(name)

    engine.check_open()
    found.pending |= set(calls)
    async with anyio.create_task_group() as group:
        for name, call in calls.items():
            group.start_soon(one, name, call)


def _models(found: _Found) -> list[dict[str, Any]]:
    return dicts(found.json("/v1/models").get("data"))


def _sglang(found: _Found) -> dict[str, Any]:
    """SGLang's server arguments; older versions have them at the older path."""
    info = found.json("/server_info") or found.json("/get_server_info")
    return info if "disable_radix_cache" in info or "schedule_policy" in info else {}


def _flavour(found: _Found, root: str) -> Flavour:
    for line in found.text("/metrics").splitlines():
        for prefix, flavour in _PREFIXES.items():
            if line.startswith(prefix):
                return flavour
    if _sglang(found):
        return "sglang"
    props = found.json("/props")
    if "total_slots" in props or "default_generation_settings" in props:
        return "llama.cpp"
    for model in _models(found):
        if (owner := str(model.get("owned_by"))) in _OWNERS:
            return _OWNERS[owner]
    if any(a.headers.get("server", "").lower().startswith("llama.cpp") for a in found.answers.values()):
        return "llama.cpp"
    return "hosted" if found.answers and _public(root) else "unknown"


def _public(root: str) -> bool:
    """Is this an address that everybody can reach?"""
    host = httpx.URL(root).host
    try:
        return ipaddress.ip_address(host.strip("[]")).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".localhost", ".internal", ".lan", ".home.arpa"))


def _read(found: _Found, engine: OpenAIEngine) -> Capabilities:
    flavour = _flavour(found, engine.root)
    metrics, props, sglang = found.text("/metrics"), found.json("/props"), _sglang(found)
    own = flavour in ("vllm", "sglang", "llama.cpp")
    settings = props.get("default_generation_settings")
    models = _models(found)
    model = next((m for m in models if m.get("id") == engine.model), models[0] if models else {})
    config = cache_config(metrics)
    caching: bool | None = None
    block: int | None = None
    window = model.get("max_model_len") or model.get("context_length")
    version = found.json("/version").get("version")
    if flavour == "vllm":
        caching = {"True": True, "False": False}.get(config.get("enable_prefix_caching", ""))
        size = config.get("block_size", "")
        block = int(size) if size.isdecimal() and len(size) < 9 else None
    elif flavour == "sglang":
        version = sglang.get("version")
        window = window or sglang.get("context_length")
        block = _whole(sglang.get("page_size"))
        off = sglang.get("disable_radix_cache")
        caching = (not off) if isinstance(off, bool) else None
    elif flavour == "llama.cpp":
        version = props.get("build_info")
        window = settings.get("n_ctx") if isinstance(settings, dict) else None
        block = 1
    reports: Any = sglang.get("enable_cache_report")
    usage = found.json("priority").get("usage")
    if isinstance(usage, dict) and read_usage(usage).cached_tokens is not None:
        reports = True
    priority, sure = _priority(found, flavour)
    slots = _slots(found) if flavour == "llama.cpp" else 0
    return Capabilities(
        flavour=flavour,
        version=version if isinstance(version, str) else None,
        context_window=_whole(window),
        priority=priority,
        priority_sure=sure,
        # In a single slot, or in one that nobody chose, a preload would take the place of what the agent has there.
        preload=own and caching is not False and (flavour != "llama.cpp" or slots >= 2),
        slots=slots,
        metrics=read_load(metrics).known,
        cached_tokens=reports if isinstance(reports, bool) else None,
        tokenize=own and isinstance(found.json("/tokenize").get("tokens"), list),
        cache_salt=flavour == "vllm",
        block_size=block,
        prefix_caching=caching,
        unanswered=tuple(sorted(found.pending)),
    )


def _priority(found: _Found, flavour: Flavour) -> tuple[Literal["lower", "higher"] | None, bool]:
    """Which way the server sorts, if it took a request with a priority, and whether it says that it does."""
    if not isinstance(found.json("priority").get("choices"), list):
        return None, False
    if flavour == "sglang":  # asked only where its flag is set
        return ("lower" if _sglang(found).get("schedule_low_priority_values_first") is True else "higher"), True
    config = found.json("/server_info").get("vllm_config")
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    policy = scheduler.get("policy") if isinstance(scheduler, dict) else None
    return (None, False) if policy == "fcfs" else ("lower", policy == "priority")


def _slots(found: _Found) -> int:
    told = _whole(found.json("/props").get("total_slots"))
    if told is not None:
        return told
    try:
        listed = json.loads(found.text("/slots") or "[]")
    except (ValueError, RecursionError):
        return 0
    return len(dicts(listed))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


__all__ = ("Capabilities", "Flavour", "Level", "probe")

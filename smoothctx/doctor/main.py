"""``smoothctx doctor``: the adoption checklist, answered for the user's own server and prompts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from ..engines import OpenAIEngine
from ..engines.http import without_user
from ..engines.wire import dicts
from ..errors import ConfigurationError
from ..outputs import Output, check_file
from ..patience import patiently
from . import log, volatile
from .examine import Settings, examine
from .findings import as_json, as_text

_ABOUT = """\
Measures whether a model server, and your prompts, are fit for context rewrites ahead of time:

  prefix cache       a prompt sent twice: cached tokens, TTFT
  changed middle     is the part before a change kept, as after a rewrite?
  cache reports      does its usage say how much was cached?
  headroom           a cached call alone, and beside one background prefill
  priority, metrics, slots, positions
  volatile prefix    what changes between two renderings of your prompt (a clock, an id)
  transform points, TTFT by turn, discard policy, summary prompt: from your own events

It sends about 6 x TOKENS x REPEATS prompt tokens, one token of answer each, and uses the last two slots of a
llama.cpp server: run it where no customer waits, and mind the price on a paid API. Where that limits requests it
waits as long as it is asked to (an hour at most), and what the API refuses (a temperature, answers of one token) is
sent without or with more.
"""
_EXAMPLES = """\
examples:
  smoothctx doctor http://127.0.0.1:8000
  smoothctx doctor http://127.0.0.1:8000 --prompt-command 'python render_prompt.py' --events events.jsonl
  smoothctx doctor https://api.example.com --model M --api-key-env API_KEY --tokens 2048 --repeats 1 --json doctor.json
"""


def add_parser(commands: Any) -> None:
    """Add the ``doctor`` command."""
    parser = commands.add_parser(
        "doctor",
        help="measure whether your own server and prompts are fit for lookahead, and say what to change",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="an OpenAI-compatible server, with or without /v1")
    parser.add_argument("--model", metavar="M", help="the model's name; default: the first that the server lists")
    parser.add_argument("--api-key-env", metavar="VAR", help="the environment variable that holds the API key")
    parser.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="size of the prompts that are sent (default 1024)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="how often each case is measured (default 3)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds without a byte (default 300)"
    )
    parser.add_argument(
        "--prompt",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="your prompt as rendered; give it twice, rendered a few seconds apart, and the two are compared",
    )
    parser.add_argument(
        "--prompt-command", metavar="CMD", help="a shell command that prints your prompt; it is run twice"
    )
    parser.add_argument("--events", metavar="FILE", type=Path, help="a runtime's events as JSON lines")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything as JSON")
    parser.set_defaults(run=command)


def command(options: argparse.Namespace) -> int:
    """Run it. Returns the exit code."""
    settings = Settings(tokens=options.tokens, repeats=options.repeats)
    check_file("--json", options.json)
    events = log.read(options.events) if options.events is not None else None
    found = anyio.run(partial(_examine, options, settings, _key(options.api_key_env), events))
    out = Output("--json", options.json)
    out.write(json.dumps(found, indent=2) + "\n")
    return out.close("figures")


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigurationError(f"--api-key-env {variable}: this environment variable is not set")
    return key


async def _examine(
    options: argparse.Namespace, settings: Settings, key: str | None, events: log.Log | None
) -> Mapping[str, Any]:
    texts = await volatile.renders(options.prompt, options.prompt_command)
    model = options.model or await _model(options, key)
    async with OpenAIEngine(options.url, model, api_key=key, timeout_s=options.timeout) as engine:
        seen = await examine(engine, settings, say=_say)
        findings = [*seen.findings, volatile.check(texts, chars_per_s=seen.chars_per_s), *log.check(events)]
        print(as_text(engine.root, model, seen.known, findings))
        return as_json(engine.root, model, seen.known, findings)


async def _model(options: argparse.Namespace, key: str | None) -> str:
    """The first model that the server lists."""
    async with OpenAIEngine(options.url, "-", api_key=key, timeout_s=options.timeout) as engine:
        listed, _ = await patiently(partial(engine.get_json, "/v1/models"), _say)
    names = [m["id"] for m in dicts(listed.get("data") if isinstance(listed, dict) else None) if m.get("id")]
    if not names or not isinstance(names[0], str):
        raise ConfigurationError(f"{without_user(options.url)} lists no models: name one with --model")
    return names[0]


def _say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)

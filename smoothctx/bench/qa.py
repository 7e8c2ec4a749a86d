"""``smoothctx bench qa``: what can still be answered from a compacted context, at several block sizes and details.

Every question is asked twice: with the raw context, and with one that was compacted without knowing the question. Each
expected answer is also a planted fact: whether it still stands in the context says what a summary kept, whatever the
model makes of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from ..codec import OpenAIMessages
from ..engines import EmbeddedEngine, OpenAIEngine
from ..engines.http import without_user
from ..errors import ConfigurationError, SmoothctxError
from ..outputs import Output, check_file
from ..transforms import ParallelSummarize, Summarize
from ..transforms.base import Transform, TransformRequest
from ..transforms.inputs import opens_with_user, units
from ..transforms.parallel_block import MIN_SUMMARY
from ..transforms.prompts_blocks import DETAILS
from ..transforms.replies import strip_thinking
from . import qa_data
from .qa_data import KINDS, Item
from .qa_figures import RAW, Cell, rows, table, weakness
from .qa_scores import action_of, equivalence, exact_match, f1, held
from .recorder import Recorder

CODEC = OpenAIMessages()
#: the same answer for the same question, as far as the server allows
GREEDY = {"temperature": 0}
#: tokens of an answer, and of an action
ANSWER_TOKENS, ACTION_TOKENS = 48, 96
#: what its files are marked with
NAME = "qa"
#: cells of an earlier way to compact or to score are not taken over
SCORES = 2
#: the smallest window in which anything can be asked
LEAST_WINDOW = 512
#: with ``--quick``: what is asked, and how short the summaries are
QUICK = {"items": 2, "blocks": "400", "details": "concise", "summary_tokens": 96, "block_summary_tokens": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to compact: ``name`` as in the table; ``block_tokens`` 0 is one summary of the whole. ``max_tokens`` caps
    each summary; 0 is the transform's own."""

    name: str
    detail: str = ""
    block_tokens: int = 0
    max_tokens: int = 0

    def transform(self, engine: Any) -> Transform | None:
        """``None`` for the raw context."""
        if self.name == RAW:
            return None
        if not self.block_tokens:
            # cut off at its cap or not: what is measured is what that many tokens hold
            return Summarize(engine, max_tokens=self.max_tokens, keep=("messages", 0), fixed_tokens=True)
        return ParallelSummarize(
            engine,
            block_tokens=self.block_tokens,
            detail=self.detail,
            max_tokens=self.max_tokens or None,
            keep=("messages", 0),
            fixed_tokens=True,
        )


def add_parser(kinds: Any) -> None:
    """Add ``bench qa``."""
    parser = kinds.add_parser(
        "qa",
        help="questions answered from compacted and from raw context",
        description=(
            "Multi-hop questions, questions about dialogues, and next actions, asked with the raw context and with "
            "contexts compacted at several block sizes and details. 'raw' is the share of the context that stayed as "
            "it was, where no smaller summary of a block came. 'held' is the share of the answers that still stand in "
            "the context, without a model. A model that answers poorly from the raw context says little about a "
            "summary: read EM, F1 and 'same' (the next action, by its structure) beside those of 'raw'."
        ),
    )
    parser.add_argument("--url", metavar="URL", help="an OpenAI-compatible server; default: the embedded engine")
    parser.add_argument("--name", metavar="NAME", help="the model's name on that server")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable that holds it instead")
    parser.add_argument("--model", metavar="FILE.gguf", help="weights of the embedded engine; with --url as --name")
    parser.add_argument("--window", type=int, default=8192, metavar="N", help="context window, tokens (default 8192)")
    parser.add_argument("--hotpotqa", type=Path, metavar="FILE", help="questions of a HotpotQA file instead of ours")
    parser.add_argument("--locomo", type=Path, metavar="FILE", help="questions of a LoCoMo file instead of ours")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"what to ask (default {','.join(KINDS)})")
    parser.add_argument(
        "--items", type=int, metavar="N", help="questions of each kind at most; with --locomo, of each conversation"
    )
    parser.add_argument("--blocks", help="block sizes, tokens (default 250,500,1000)")
    parser.add_argument("--details", help=f"of {','.join(DETAILS)} (default concise,detailed)")
    parser.add_argument("--summary-tokens", type=int, help="cap of the one sequential summary (default 256)")
    parser.add_argument("--block-summary-tokens", type=int, metavar="N", help="cap of each block's summary")
    parser.add_argument(
        "--quick", action="store_true", help="two questions of each kind, one block size, short summaries"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every cell and the table; an interrupted run goes on from it"
    )
    parser.set_defaults(run=command)


def command(options: argparse.Namespace) -> int:
    """Run it. Returns the exit code: 1 when no question could be asked at all."""
    items, settings = chosen_items(options), chosen_settings(options)
    check_file("--json", options.json)
    cells: list[Cell] = []
    out = Output("--json", options.json)
    try:
        anyio.run(_with_engine, options, items, settings, cells, out)
    finally:  # also when interrupted: what is there is shown, and with --json nothing of it is lost
        if cells:
            print(table(cells))
            if note := weakness(cells):
                print(note)
            out.close("figures")
    return max(int(out.failed), 0 if any(not c.error for c in cells) else 1)


def _defaults(options: argparse.Namespace) -> None:
    """What was not said: by ``--quick``, or the usual."""
    usual = {"items": None, "blocks": "250,500,1000", "details": "concise,detailed", "summary_tokens": 256}
    usual["block_summary_tokens"] = None
    for name, value in (QUICK if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def chosen_items(options: argparse.Namespace) -> list[Item]:
    """The questions to ask.

    Raises:
        ConfigurationError: a wrong kind or count, or a file that cannot be read.
    """
    _defaults(options)
    kinds = _names("--kinds", options.kinds, KINDS)
    limit = options.items
    if limit is not None and limit < 1:
        raise ConfigurationError(f"--items {limit}: expected at least 1")
    if options.hotpotqa is not None or options.locomo is not None:
        found = qa_data.load_hotpotqa(options.hotpotqa, limit) if options.hotpotqa is not None else []
        found += qa_data.load_locomo(options.locomo, limit) if options.locomo is not None else []
    else:
        found = qa_data.own_items()
    items = []
    for kind in kinds:
        same = [i for i in found if i.kind == kind]
        items += same if options.locomo is not None and kind == "dialogue" else same[:limit]
    if not items:
        raise ConfigurationError(f"--kinds {options.kinds}: there are no such questions in the files given")
    return items


def chosen_settings(options: argparse.Namespace) -> list[Setting]:
    """The raw context, one summary, and blocks of each size at each detail.

    Raises:
        ConfigurationError: a wrong size, detail or window.
    """
    _defaults(options)
    if options.window < LEAST_WINDOW:
        raise ConfigurationError(f"--window {options.window}: expected at least {LEAST_WINDOW}")
    for name in ("summary_tokens", "block_summary_tokens"):
        value = getattr(options, name)
        if value is not None and value < 16:
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: expected at least 16")
    settings = [Setting(name=RAW), Setting(name="summarize", max_tokens=options.summary_tokens)]
    details, cap = _names("--details", options.details, tuple(DETAILS)), options.block_summary_tokens or 0
    for size in _sizes(options.blocks):
        for detail in details:
            name = f"blocks {size} {detail}"
            settings.append(Setting(name=name, detail=detail, block_tokens=size, max_tokens=cap))
    return settings


def _sizes(value: str) -> list[int]:
    least = 2 * MIN_SUMMARY
    try:
        sizes = [int(x) for x in value.split(",") if x.strip()]
    except ValueError:  # too many digits is one as well
        sizes = [0]
    if any(size < least for size in sizes):
        raise ConfigurationError(f"--blocks {value}: expected whole numbers of at least {least}")
    return list(dict.fromkeys(sizes))


def _names(option: str, value: str, allowed: Sequence[str]) -> list[str]:
    names = [x.strip() for x in value.split(",") if x.strip()]
    if not names or any(n not in allowed for n in names):
        raise ConfigurationError(f"{option} {value}: expected names out of {', '.join(allowed)}")
    return list(dict.fromkeys(names))


async def _with_engine(
    options: argparse.Namespace, items: Sequence[Item], settings: Sequence[Setting], cells: list[Cell], out: Output
) -> None:
    held = _read(out.file)
    if options.url is None:
        print("starting the embedded engine ...", file=sys.stderr, flush=True)
        engine: Any = EmbeddedEngine(options.model, context_window=options.window, slots=1)
        name = options.model
    else:
        name = options.name or options.model
        if not name:
            raise ConfigurationError("--url: needs --name NAME, the model's name on that server")
        engine = OpenAIEngine(options.url, name, api_key=_key(options), context_window=options.window)
    async with engine:
        place = without_user(options.url or "embedded")
        identity = f"{place}#{name or getattr(engine, 'model', 'embedded')}"
        await measure(engine, identity, items, settings, cells, out, held)


def _key(options: argparse.Namespace) -> str | None:
    if options.api_key_env is None or options.api_key is not None:
        return None if options.api_key is None else str(options.api_key)
    key = os.environ.get(options.api_key_env)
    if not key:  # what was given may be the key itself: it is not shown
        raise ConfigurationError("--api-key-env: the environment variable that it names is not set")
    return key


async def measure(
    engine: Any,
    identity: str,
    items: Sequence[Item],
    settings: Sequence[Setting],
    cells: list[Cell],
    out: Output | None = None,
    held: Mapping[str, Cell] | None = None,
) -> None:
    """Ask every question under every setting and put the cells into ``cells``, but for what is among the ``held`` ones
    of an earlier run and did not fail. After each cell ``out`` has all of them."""
    left = dict(held or {})
    total = len(items) * len(settings)
    for item in items:
        reference = ""
        for setting in settings:
            key = cell_key(identity, item, setting)
            cell = left.pop(key, None)
            if cell is None or cell.error:
                cell = replace(await ask(engine, item, setting), key=key)
            if setting.name == RAW:
                reference = cell.answer
            cell = compared(cell, reference)
            cells.append(cell)
            if out is not None:
                out.write(json.dumps(as_json(cells, list(left.values())), indent=2) + "\n")
            shown = cell.error or f"{cell.context_tokens} tokens: {cell.answer[:60]!r}"
            print(f"[{len(cells)}/{total}] {item.id} {setting.name}: {shown}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compared(cell: Cell, reference: str) -> Cell:
    """An action's score: how near it is to the ``reference``, what was said with the raw context. Without a call in
    that one there is nothing to compare."""
    if cell.kind != "action" or cell.error:
        return cell
    expected = action_of(reference)
    if expected.tool is None:
        return replace(cell, equivalence=None)
    return replace(cell, equivalence=equivalence(action_of(cell.answer), expected).score)


async def ask(engine: Any, item: Item, setting: Setting) -> Cell:
    """One cell: compact, ask, and score what can be scored by itself."""
    raw = sum(map(CODEC.estimate, item.messages))
    cell = Cell(key="", setting=setting.name, kind=item.kind, item=item.id, raw_tokens=raw)
    recorder = Recorder(engine, say=_say)
    try:
        context = await compacted(item, setting.transform(recorder))
        left = _left_raw(item, context)
        if left and recorder.failed:  # not the transform's doing: as if all of it had failed
            return replace(cell, error=f"{left:.0%} of the context stayed raw: {recorder.failed[-1]}")
        asked = [*context, {"role": "user", "content": item.ask}]
        sent = opens_with_user([m for u in units(asked, CODEC) for m in u.messages])
        limit = ACTION_TOKENS if item.kind == "action" else ANSWER_TOKENS
        reply = await recorder.complete(sent, max_tokens=limit, **GREEDY)
    except SmoothctxError as error:
        return replace(cell, error=f"{type(error).__name__}: {error}")
    answer = strip_thinking(reply.text)
    cell = replace(cell, answer=answer, context_tokens=sum(map(CODEC.estimate, context)), left_raw=left)
    if item.kind == "action":
        return cell
    kept = held("\n".join(map(CODEC.text, context)), item.answers)
    return replace(cell, held=kept, exact_match=exact_match(answer, item.answers), f1=f1(answer, item.answers))


async def compacted(item: Item, transform: Transform | None) -> list[dict[str, Any]]:
    """The context that the question is asked with: the system message and what stands for the rest."""
    lead = [m for m in item.messages if m["role"] == "system"]
    rest = [m for m in item.messages if m["role"] != "system"]
    if transform is None:
        return [*lead, *rest]
    request = TransformRequest(messages=rest, before=lead, codec=CODEC, options=GREEDY)
    return [*lead, *(await transform.apply(request)).messages]


def _left_raw(item: Item, context: Sequence[dict[str, Any]]) -> float:
    """Share of what was there to compact that still stands there as it was."""
    there = [m for m in context if m["role"] != "system" and CODEC.summary_text(m) is None]
    whole = sum(CODEC.estimate(m) for m in item.messages if m["role"] != "system")
    return sum(map(CODEC.estimate, there)) / whole if whole else 0.0


def cell_key(identity: str, item: Item, setting: Setting) -> str:
    """Names a cell by everything that its result depends on."""
    parts = [identity, asdict(item), asdict(setting), ANSWER_TOKENS, ACTION_TOKENS, SCORES]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _read(file: Path | None) -> dict[str, Cell]:
    """The cells of an earlier run, by key.

    Raises:
        ConfigurationError: it is not a file of this benchmark.
    """
    if file is None or not file.exists():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["benchmark"] != NAME:
            raise ValueError(f"its benchmark is {data['benchmark']!r}")
        cells = [Cell(**cell) for cell in data["cells"]]
        return {cell.key: cell for cell in cells}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--json {file}: it is not a file of this benchmark ({error})") from error


def as_json(cells: Sequence[Cell], others: Sequence[Cell] = ()) -> Mapping[str, Any]:
    """Everything for machines: the rows of the table, and each cell. ``others`` are cells of earlier runs with other
    questions, settings or engines: kept, and in no row."""
    return {"benchmark": NAME, "rows": rows(cells), "cells": [asdict(c) for c in (*cells, *others)]}

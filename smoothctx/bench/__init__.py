"""Benchmarks: what a rewrite costs, keeps and saves, measured on an engine of one's own."""

from __future__ import annotations

from typing import Any

from . import qa, ttft, volume


def add_parser(commands: Any) -> None:
    """Add the ``bench`` command and its parts."""
    parser = commands.add_parser("bench", help="measure what a rewrite costs, keeps and saves")
    kinds = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    qa.add_parser(kinds)
    ttft.add_parser(kinds)
    volume.add_parser(kinds)

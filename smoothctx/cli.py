"""The command line: ``smoothctx``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, bench
from .demo import main as demo
from .doctor import main as doctor
from .errors import SmoothctxError


def build() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="smoothctx", description="Context rewrites of long-running LLM agents, done ahead of time."
    )
    parser.add_argument("--version", action="version", version=f"smoothctx {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    bench.add_parser(commands)
    demo.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. 0: done; 1: it failed; 2: wrong arguments; 130: interrupted."""
    options = build().parse_args(argv)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except SmoothctxError as error:
        print(f"smoothctx: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

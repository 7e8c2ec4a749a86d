"""The command line: ``smoothctx``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__, bench
from .demo import main as demo
from .doctor import main as doctor
from .errors import SmoothctxError


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names only, in every command, and never shows a key."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """As in argparse: the usage and what is wrong, and exit code 2."""
        super().error(re.sub(r"(--?api[\w-]*[ =]+)\S+", r"\1...", message))


def build() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = Parser(prog="smoothctx", description="Context rewrites of long-running LLM agents, done ahead of time.")
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
    except (SmoothctxError, OSError) as error:  # a file, or our own output: no traceback of either
        print(f"smoothctx: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

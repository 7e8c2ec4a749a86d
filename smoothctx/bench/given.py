"""What the benchmarks are given on the command line alike: the engine, and the folder that an agent reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigurationError

SOURCES = Path(__file__).resolve().parent.parent


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The options that name an engine."""
    parser.add_argument("--url", metavar="URL", help="an OpenAI-compatible server; default: the embedded engine")
    parser.add_argument("--name", metavar="NAME", help="the model's name on that server")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--model", metavar="FILE.gguf", type=Path, help="weights of the embedded engine")


def check_engine(options: argparse.Namespace) -> None:
    """Is the engine named in full?

    Raises:
        ConfigurationError: a server without a model's name.
    """
    if options.url and not options.name:
        raise ConfigurationError("--url: needs --name NAME, the model's name on that server")


def folder(options: argparse.Namespace) -> Path:
    """The folder of ``--path``; without it this package's sources.

    Raises:
        ConfigurationError: there is no such folder.
    """
    path: Path = options.path or SOURCES
    if not path.exists():
        raise ConfigurationError(f"--path {path}: there is no such folder")
    return path

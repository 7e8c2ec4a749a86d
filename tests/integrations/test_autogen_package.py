"""The package: nothing is imported before it is used, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import smoothctx_autogen

ROOT = Path(__file__).parents[2]


def script(code: str) -> str:
    """Run it as a process of its own, warnings being errors."""
    paths = [str(ROOT), str(ROOT / "integrations" / "autogen"), str(ROOT / "tests"), str(ROOT / "tests/integrations")]
    head = f"import sys\nsys.path[:0] = {paths!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + code], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_importing_it_imports_no_framework() -> None:
    """Only a name from it does."""
    code = (
        "import smoothctx_autogen\n"
        "found = {m.partition('.')[0] for m in sys.modules}\n"
        "print(sorted(found & {'autogen_core', 'autogen_agentchat', 'ag2', 'autogen', 'agent_framework', 'pydantic'}))"
    )
    assert script(code) == "[]"


@pytest.mark.parametrize("name", smoothctx_autogen.__all__)
def test_a_missing_framework_names_the_extra(name: str) -> None:
    """An ``ImportError`` that says what to install; each other name is an ``AttributeError``."""
    code = (
        "sys.modules['autogen_core'] = None\n"
        "import smoothctx_autogen\n"
        "try:\n"
        f"    smoothctx_autogen.{name}\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('no need of it')"
    )
    said = script(code)
    if name.endswith("default_runtime"):
        assert said == "no need of it"
    else:
        assert f"smoothctx_autogen.{name} needs AutoGen" in said and "pip install 'smoothctx[autogen]'" in said


def test_names() -> None:
    """All of them can be had, are listed by ``dir``, and stay."""
    for name in smoothctx_autogen.__all__:
        assert getattr(smoothctx_autogen, name) is getattr(smoothctx_autogen, name)
        assert name in dir(smoothctx_autogen)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = smoothctx_autogen.Nothing


def test_a_process_that_used_the_default_runtime_ends() -> None:
    """Without a word, with a lookahead still under way on it."""
    code = (
        "import asyncio\n"
        "from autogen_helpers import Summarizer, chat, options\n"
        "from smoothctx_autogen import LookaheadChatCompletionContext, default_runtime\n"
        "async def main():\n"
        "    context = LookaheadChatCompletionContext(Summarizer('hang'), options=options(), own_client=True)\n"
        "    for message in chat(3):\n"
        "        await context.add_message(message)\n"
        "    print(default_runtime().counters.started)\n"
        "asyncio.run(main())\n"
    )
    assert script(code) == "1"


def test_a_forked_child_starts_one_of_its_own() -> None:
    """The thread of its parent is not there."""
    code = (
        "import asyncio, os, warnings\n"
        "from autogen_helpers import Summarizer, chat, options, summaries\n"
        "from smoothctx_autogen import LookaheadChatCompletionContext, close_default_runtime, default_runtime\n"
        "async def main():\n"
        "    context = LookaheadChatCompletionContext(Summarizer(), options=options(), own_client=True)\n"
        "    for message in chat(3):\n"
        "        await context.add_message(message)\n"
        "    await context.session.lookahead.wait(60)\n"
        "    return bool(summaries(await context.get_messages()))\n"
        "parent = default_runtime()\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # from 3.12 on, of a fork beside threads
        "if not (child := os.fork()):\n"
        "    good = default_runtime() is not parent and asyncio.run(main())\n"
        "    close_default_runtime()\n"
        "    os._exit(0 if good else 1)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert script(code) == "0"

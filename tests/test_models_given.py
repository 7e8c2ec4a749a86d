"""What may be given as a model: async functions in every dress, and nothing that fails at each call."""

from __future__ import annotations

import functools
from collections.abc import Awaitable
from typing import Any

import pytest

from smoothctx import Policy, Runtime, Summarize
from smoothctx.errors import ConfigurationError
from smoothctx.transforms.model import Model
from transform_fakes import FakeModel


def _silent(messages: list[dict[str, Any]], *, max_tokens=None):  # type: ignore[no-untyped-def]
    """Says nothing about what it returns."""
    return ""


def _text(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
    """Says that it returns a text."""
    return ""


def _unknown(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
    """Says something that cannot be looked up."""


class _Sync:
    def ask(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
        """A method."""
        return ""


@pytest.mark.parametrize("model", [_silent, _text, _unknown, _Sync().ask])
def test_a_plain_function_is_refused_at_construction(model: Any) -> None:
    """Each call of it would fail in the background: said at once, by `Summarize` and by `wrap`."""
    with pytest.raises(ConfigurationError, match="it is not async"):
        Summarize(model)
    policy = Policy(Summarize(FakeModel()), context_window=1000)
    with pytest.raises(ConfigurationError, match="expected an async function"):
        Runtime().wrap(model, policy=policy)


async def _answer(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
    return "The summary."


def _awaitable(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> Awaitable[str]:
    return _answer(messages)


def _either(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str | Awaitable[str]:
    return _answer(messages)


def _named(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> Nowhere[Awaitable[str]]:  # type: ignore[name-defined]  # noqa: F821
    return _answer(messages)


@functools.wraps(_answer)
def _wrapper(*args: Any, **kwargs: Any) -> Any:
    return _answer(*args, **kwargs)


class _Callable:
    def __call__(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        """An object."""
        return _answer(messages)

    async def ask(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """An async method."""
        return await _answer(messages)


@pytest.mark.parametrize(
    "model",
    [
        _answer,
        _awaitable,
        _either,
        _named,
        _wrapper,
        _Callable(),
        _Callable().ask,
        lambda messages, **kwargs: _answer(messages),
        functools.partial(_answer, max_tokens=5),
    ],
)
async def test_what_may_return_an_awaitable_is_a_model(model: Any) -> None:
    """Async functions in every dress, and functions that say so or cannot say it."""
    made = await Model(model).ask([{"role": "user", "content": "x"}], max_tokens=9)
    assert made.text == "The summary."

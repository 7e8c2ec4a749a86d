"""Chat models of our own that remember how they were asked, for the tests of the LangChain integration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables.config import var_child_runnable_config
from langsmith.run_helpers import get_current_run_tree
from pydantic import SecretStr

SECRET = "summary-text-of-the-background"
USAGE = {"input_tokens": 120, "output_tokens": 7, "total_tokens": 127, "input_token_details": {"cache_read": 100}}
ASK = [{"role": "user", "content": "Sum it up."}]


class Base(BaseChatModel):
    """Answers what it was given, streams word by word, and remembers how it was asked."""

    model: str = "fake-1"
    base_url: str | None = "https://user:pw@llm.example.org:8000/v1/?key=hidden"
    api_key: SecretStr = SecretStr("hidden")
    temperature: float = 0.0
    timeout: float = 60
    answer: Any = SECRET
    asked: list[tuple[list[BaseMessage], dict[str, Any]]] = []
    configs: list[Any] = []
    profile: Any = {"max_input_tokens": 9000}

    @property
    def _llm_type(self) -> str:
        return "fake"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, "temperature": self.temperature, "api_key": "hidden", "timeout": self.timeout}

    def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> ChatResult:
        self.asked.append((messages, {k: v for k, v in kwargs.items() if k != "stop"}))
        self.configs.append((var_child_runnable_config.get(), get_current_run_tree()))
        answer = self.answer if isinstance(self.answer, AIMessage) else AIMessage(self.answer, usage_metadata=USAGE)
        return ChatResult(generations=[ChatGeneration(message=answer.model_copy())])

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)


class Fake(Base):
    """The same, with a bound on its answers."""

    max_tokens: int | None = None


class Streaming(Fake):
    """The same, natively asynchronous and streaming."""

    async def _astream(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        run_manager = kwargs.pop("run_manager", None)
        self._generate(messages)
        for word in str(self.answer).split("-"):
            chunk = ChatGenerationChunk(message=AIMessageChunk(word))
            if run_manager is not None:
                await run_manager.on_llm_new_token(word, chunk=chunk)
            yield chunk

    def _stream(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        self._generate(messages)
        for word in str(self.answer).split("-"):
            yield ChatGenerationChunk(message=AIMessageChunk(word))


class Limited(Base):
    """Calls its bound on the answer as Ollama does."""

    num_predict: int | None = None


class Thinking(Fake):
    """Thinks within a budget, as Anthropic's models do."""

    thinking: dict[str, Any] | None = None


class Other(BaseChatModel):
    """Says nothing of itself: no name, no bound."""

    @property
    def _llm_type(self) -> str:
        return "other"

    def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> ChatResult:
        assert "max_tokens" not in kwargs
        return ChatResult(generations=[ChatGeneration(message=AIMessage("plain"))])


def fake(cls: type[Base] = Fake, **fields: Any) -> Any:
    """A fake with its own lists."""
    return cls(asked=[], configs=[], **fields)

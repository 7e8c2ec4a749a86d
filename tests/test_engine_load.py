"""Load: the metrics pages of three servers, and pages that are none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from flavour_servers import LLAMA_METRICS, SGLANG_METRICS, VLLM_METRICS, ModelServer
from smoothctx import EngineUnreachable
from smoothctx.engines import Load
from smoothctx.engines.load import cache_config, read_load, read_metrics, read_slots
from virtual import run_virtual


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (VLLM_METRICS, Load(running=2, waiting=1, kv_used=0.25, prompt_tokens=1986, cached_tokens=896)),
        # by SGLang's documented names, not from a running server
        (SGLANG_METRICS, Load(running=8, waiting=4, kv_used=0.52, prompt_tokens=500, cached_tokens=120)),
        (LLAMA_METRICS, Load(running=1, waiting=0, prompt_tokens=1774, cached_tokens=1458)),
        ("vllm:gpu_cache_usage_perc 0.5\n", Load(kv_used=0.5)),
        ("llamacpp:kv_cache_usage_ratio 1.5\n", Load(kv_used=1.0)),
    ],
)
def test_each_servers_page(page: str, load: Load) -> None:
    """Each server's own names are read into the same load."""
    assert read_load(page) == load and load.known


def test_several_engines_behind_one_page_add_up() -> None:
    """Requests of all of them count, and the fullest cache."""
    page = "".join(
        f'vllm:num_requests_running{{engine="{k}"}} {k + 1}\nvllm:kv_cache_usage_perc{{engine="{k}"}} 0.{k + 1}\n'
        for k in range(3)
    )
    assert read_load(page) == Load(running=6, kv_used=0.3)


def test_labels_with_quotes_braces_and_commas() -> None:
    """Label values may hold whatever they like."""
    page = 'vllm:num_requests_running{a="x, y} z",b="say \\"hi\\"",c="\\\\"} 3 1700000000\r\n'
    (sample,) = read_metrics(page)["vllm:num_requests_running"]
    assert sample.value == 3 and sample.labels["a"] == "x, y} z" and sample.labels["b"] == 'say \\"hi\\"'


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_running ",
        "vllm:num_requests_running many",
        "vllm:num_requests_running NaN",
        "vllm:num_requests_running +Inf",
        'vllm:num_requests_running{model="m" 3',
        "vllm:num_requests_running{} 1 2 3 4",
        "vllm:num_requests_running_by_moon 3",
        "# vllm:num_requests_running 3",
        "<html>vllm:num_requests_running 3</html>",
        "",
    ],
)
def test_what_is_no_sample_is_skipped(line: str) -> None:
    """A line that says nothing usable changes nothing, and the lines around it count."""
    assert read_load(line) == Load() and not read_load(line).known
    assert read_load(f"{line}\nvllm:num_requests_waiting 7\n{line}") == Load(waiting=7)


@given(st.text(max_size=200), st.sampled_from(["vllm:num_requests_running", "vllm:kv_cache_usage_perc{"]))
def test_property_garbage_never_raises(text: str, start: str) -> None:
    """Whatever a page holds, the load is one: whole numbers from 0, a share from 0 to 1."""
    load = read_load(start + text)
    assert load.running is None or load.running >= 0
    assert load.kv_used is None or 0 <= load.kv_used <= 1


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e9))
def test_property_numbers_come_back(value: float) -> None:
    """Any way of writing a number is read."""
    assert read_load(f"vllm:num_requests_waiting {value!r}").waiting == round(value)
    share = read_load(f"sglang:token_usage {value:e}").kv_used
    assert share is not None and math.isclose(share, min(1.0, value), rel_tol=1e-5, abs_tol=1e-9)


def test_slots_and_cache_config() -> None:
    """llama.cpp's slots tell what runs; vLLM's metrics how its cache is set up."""
    assert read_slots([{"is_processing": True}, {"is_processing": False}, 3]) == Load(running=1)
    for nonsense in (None, {}, [], [3], [{"is_processing": "yes"}]):
        assert read_slots(nonsense) == Load()
    assert cache_config(VLLM_METRICS)["block_size"] == "128" and cache_config("") == {}


@pytest.mark.parametrize("flavour", ["vllm", "sglang", "llama.cpp"])
def test_load_of_a_server(flavour: str) -> None:
    """The engine reads its server's page."""

    async def main() -> Load:
        return await ModelServer(flavour).engine().load()

    assert run_virtual(main).running == {"vllm": 2, "sglang": 8, "llama.cpp": 1}[flavour]


def test_load_without_metrics() -> None:
    """llama.cpp's slots stand in for missing metrics; a server without either has an unknown load."""

    async def main(flavour: str) -> tuple[Load, list[str]]:
        server = ModelServer(flavour, pages={"/metrics": (501, {"error": {"message": "start with --metrics"}})})
        engine = server.engine()
        await engine.probe()
        server.paths.clear()
        return await engine.load(), server.paths

    assert run_virtual(lambda: main("llama.cpp")) == (Load(running=1), ["/metrics", "/slots"])
    assert run_virtual(lambda: main("vllm")) == (Load(), ["/metrics"])


def test_load_of_a_server_that_hangs() -> None:
    """No answer in time is an error of the server's, after a bounded wait."""

    async def main() -> None:
        with pytest.raises(EngineUnreachable, match=r"no word of its load within 2 s"):
            await ModelServer(hang=frozenset({"/metrics"})).engine().load()

    run_virtual(main)

"""Stores: bounded, per tenant, exact bytes, and never a damaged value."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import anyio
import pytest

from helpers import FakeSummarizer, chat, make_policy, make_runtime, settle
from smoothctx.errors import ConfigurationError, StoreError
from smoothctx.stores import FolderStore, MemoryStore
from smoothctx.testing import run_virtual


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def files(root: Path) -> list[Path]:
    """Every file of a folder store."""
    return list(root.glob("*/*"))


def run(function: Any) -> None:
    """On a real loop, as a program does."""
    anyio.run(function)


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def build(**options: Any) -> Any:
        return MemoryStore(**options) if request.param == "memory" else FolderStore(tmp_path / "s", **options)

    return build


@pytest.mark.parametrize("value", [b"", b"\r\nline\r\n", b"\x00\xff" * 1000, b"\n" * 10, "漢字".encode()], ids=repr)
def test_bytes_come_back_exactly_b164(make: Any, value: bytes) -> None:
    """B164: CRLF and binary data are not touched."""

    async def body() -> None:
        store = make()
        await store.put("t", "k", value)
        assert await store.get("t", "k") == value
        await store.put("t", "k", value + b"2")
        assert await store.get("t", "k") == value + b"2"
        await store.delete("t", "k")
        await store.delete("t", "k")
        assert await store.get("t", "k") is None
        await store.aclose()

    run(body)


@pytest.mark.parametrize("key", ["x" * 1500, "../../etc/passwd", "a/b\\c:d*?", "", "\udcff", "call\n1"], ids=range(6))
def test_any_key_works_b162(make: Any, key: str) -> None:
    """B162: long ids, separators and odd characters are only ever hashed."""

    async def body() -> None:
        store = make()
        await store.put(key, key, b"v")
        assert await store.get(key, key) == b"v"

    run(body)


def test_promise_12_tenants_are_apart(make: Any) -> None:
    """The same key of another tenant is another value, whatever the names."""

    async def body() -> None:
        store = make()
        await store.put("a", "b/k", b"1")
        assert await store.get("a/b", "k") is None
        await store.put("a/b", "k", b"2")
        assert await store.get("a", "b/k") == b"1"
        await store.delete("a", "b/k")
        assert await store.get("a/b", "k") == b"2"

    run(body)


def test_values_expire(make: Any) -> None:
    """ttl of the value, else of the store, else none."""

    async def body() -> None:
        clock = Clock()
        store = make(clock=clock, ttl=100)
        await store.put("t", "short", b"1", ttl=10)
        await store.put("t", "default", b"2")
        clock.now += 10
        assert await store.get("t", "short") is None
        assert await store.get("t", "default") == b"2"
        clock.now += 90
        assert await store.get("t", "default") is None

    run(body)


def test_promise_10_memory_is_bounded_least_recently_used_first() -> None:
    """Bytes and entries; expired values go before live ones; a value larger than the store is refused."""

    async def body() -> None:
        clock = Clock()
        store = MemoryStore(max_bytes=100, max_entries=3, clock=clock)
        for k in range(3):
            await store.put("t", str(k), b"x" * 10)
        await store.get("t", "0")
        await store.put("t", "3", b"x")
        assert [await store.get("t", str(k)) is not None for k in range(4)] == [True, False, True, True]
        await store.put("t", "big", b"x" * 95)
        assert await store.get("t", "big") is not None and len(store) == 1 or len(store) == 2
        with pytest.raises(StoreError, match="value of 101 bytes is larger than max_bytes=100"):
            await store.put("t", "huge", b"x" * 101)
        store = MemoryStore(max_entries=2, clock=clock)
        await store.put("t", "live", b"1")
        await store.put("t", "dead", b"1", ttl=1)
        clock.now += 2
        await store.put("t", "new", b"1")
        assert await store.get("t", "live") == b"1" and await store.get("t", "new") == b"1"

    run(body)


def test_promise_10_folder_is_bounded_oldest_first(tmp_path: Path) -> None:
    """The oldest files go; the newest always stays; a fresh process measures what it finds."""

    async def body() -> None:
        for round_ in range(3):
            store = FolderStore(tmp_path, max_bytes=5000)
            for k in range(20):
                await store.put("t", f"{round_}-{k}", b"x" * 400)
                for file in files(tmp_path):
                    os.utime(file, (file.stat().st_mtime - 10,) * 2)
                assert await store.get("t", f"{round_}-{k}") is not None
                assert sum(f.stat().st_size for f in files(tmp_path)) <= 5000
            assert await store.get("t", f"{round_}-0") is None
        with pytest.raises(StoreError, match="larger than max_bytes=5000"):
            await store.put("t", "huge", b"x" * 5001)

    run(body)


def test_files_are_private_b168(tmp_path: Path) -> None:
    """B168: mode 0600 in folders of mode 0700; no name tells anything."""

    async def body() -> None:
        root = tmp_path / "new" / "store"
        await FolderStore(root).put("tenant", "key", b"v")
        (file,) = files(root)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == stat.S_IMODE(root.stat().st_mode) == 0o700
        assert "tenant" not in str(file.relative_to(root)) and "key" not in file.name

    run(body)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage", "other key"])
def test_damaged_files_read_as_missing(tmp_path: Path, damage: str) -> None:
    """A value whose checksum is wrong is never returned, and its file is removed."""

    async def body() -> None:
        store = FolderStore(tmp_path)
        await store.put("t", "k", b"value" * 100)
        (file,) = files(tmp_path)
        data = file.read_bytes()
        if damage == "other key":
            await store.put("t", "k2", b"another")
            other = next(f for f in files(tmp_path) if f != file)
            data_new = other.read_bytes()
        else:
            data_new = {"flip": data[:-1] + b"X", "cut": data[:-7], "empty": b"", "garbage": b"no\nheader"}[damage]
        file.write_bytes(data_new)
        assert await store.get("t", "k") is None
        assert not file.exists()
        await store.put("t", "k", b"again")
        assert await store.get("t", "k") == b"again"

    run(body)


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """What one wrote the other reads; a dead writer's half file is ignored, and removed when it is old."""

    async def body() -> None:
        clock = Clock(os.stat(tmp_path).st_mtime)
        one, two = FolderStore(tmp_path), FolderStore(tmp_path, max_bytes=1000, clock=clock)
        await one.put("t", "k", b"v")
        assert await two.get("t", "k") == b"v"
        (file,) = files(tmp_path)
        half = file.parent / ".new-dead"
        half.write_bytes(b"half")
        await two.put("t", "k2", b"v")
        assert half.exists()
        clock.now += 7200
        await FolderStore(tmp_path, max_bytes=1000, clock=clock).put("t", "k3", b"v")
        assert not half.exists() and await one.get("t", "k") == b"v"

    run(body)


def test_parallel_writers_never_show_half_a_value(tmp_path: Path) -> None:
    """Writers and readers of one key at once: each read is one of the written values."""

    async def body() -> None:
        store = FolderStore(tmp_path)
        values = [bytes([65 + k]) * 50_000 for k in range(4)]
        await store.put("t", "k", values[0])

        async def write(value: bytes) -> None:
            for _ in range(10):
                await store.put("t", "k", value)

        async def read() -> None:
            for _ in range(20):
                assert await store.get("t", "k") in values

        async with anyio.create_task_group() as group:
            for value in values:
                group.start_soon(write, value)
            group.start_soon(read)

    run(body)


def test_an_unusable_folder_is_a_store_error(tmp_path: Path) -> None:
    """The file system's error comes out as ours."""

    async def body() -> None:
        blocker = tmp_path / "s"
        store = FolderStore(blocker)
        blocker.write_text("a file where the folder should be")
        with pytest.raises(StoreError, match="store folder cannot be written"):
            await store.put("t", "k", b"v")
        with pytest.raises(StoreError, match="store folder cannot be read"):
            await store.get("t", "k")

    run(body)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: MemoryStore(max_bytes=0), "max_bytes=0: expected a whole number above 0"),
        (lambda: MemoryStore(max_entries=1.5), r"max_entries=1\.5: expected a whole number above 0"),  # type: ignore[arg-type]
        (lambda: MemoryStore(ttl=-1), "ttl=-1: expected a number of seconds above 0, or None"),
        (lambda: FolderStore(""), "path='': expected the path of a folder"),
        (lambda: FolderStore(__file__), "is not a folder"),
    ],
)
def test_wrong_options_are_named(make_it: Any, message: str) -> None:
    """Configuration mistakes raise at construction."""
    with pytest.raises(ConfigurationError, match=message):
        make_it()


def test_a_folder_works_on_virtual_time(tmp_path: Path) -> None:
    """Its threads are waited for, the clock standing still: what one runtime wrote, the next one finds at once."""

    async def main() -> tuple[list[str], float]:
        loop, store = asyncio.get_running_loop(), FolderStore(tmp_path)
        await store.put("t", "key", b"value")
        assert await store.get("t", "key") == b"value" and loop.time() == 0
        await store.delete("t", "key")
        assert await store.get("t", "key") is None
        for _ in range(20):  # an hour each, none of which passes while a thread works
            await asyncio.sleep(3600)
            with anyio.fail_after(0.001):
                await store.put("t", "key", b"again")
        how: list[str] = []
        messages = chat(13)
        for _ in range(2):
            async with make_runtime(store=FolderStore(tmp_path)) as runtime:
                session = runtime.session("s", policy=make_policy(FakeSummarizer(), model_id="m"))
                await session.commit(messages)
                await settle(60)
                await session.commit(messages)
                how += [r.how for r in session.receipts]
                await runtime.aclose(drain=True)
        return how, loop.time()

    how, passed = run_virtual(main)
    assert how == ["ready", "salvaged"] and passed == pytest.approx(20 * 3600 + 120)

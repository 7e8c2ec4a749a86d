"""The stores that need no server: ``MemoryStore`` and ``FolderStore``, which survives restarts."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio

from .errors import ConfigurationError, StoreError

T = TypeVar("T")

_MAGIC = b"smoothctx-store-1"
#: seconds after which a temporary file of a writer that died is removed
_STALE_TEMPORARY = 3600.0
#: writes after which a folder is measured anew, since other processes write into it too
_REMEASURE = 256


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call it in a thread and wait for its end, whatever is cancelled. In one of the loop's own executor: a loop on
    virtual time knows of those, and waits for them in real time."""
    ended = asyncio.get_running_loop().run_in_executor(None, function, *args)
    with anyio.CancelScope(shield=True):
        await ended
    return ended.result()


class MemoryStore:
    """Keeps values in this process; the least recently used go first when a bound is reached.

    Args:
        max_bytes: bound on the size of all values.
        max_entries: bound on their number.
        ttl: seconds that a value lives when ``put`` names none, ``None`` for as long as it fits.
        clock: seconds, monotonic.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 64 * 2**20,
        max_entries: int = 10_000,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = _bound("max_bytes", max_bytes)
        self._max_entries = _bound("max_entries", max_entries)
        self._ttl = _check_ttl(ttl)
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, str], tuple[bytes, float | None]] = OrderedDict()
        self._size = 0

    async def get(self, tenant: str, key: str) -> bytes | None:
        """The value, or ``None`` where there is none (any more)."""
        with self._lock:
            entry = self._held.get((tenant, key))
            if entry is None:
                return None
            value, expires = entry
            if expires is not None and expires <= self._clock():
                self._drop((tenant, key))
                return None
            self._held.move_to_end((tenant, key))
            return value

    async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Keep a value.

        Raises:
            StoreError: when it alone is larger than the store.
        """
        if len(value) > self._max_bytes:
            raise StoreError(f"value of {len(value)} bytes is larger than max_bytes={self._max_bytes}")
        lives = self._ttl if ttl is None else ttl
        with self._lock:
            now = self._clock()
            self._drop((tenant, key))
            self._held[tenant, key] = (bytes(value), None if lives is None else now + lives)
            self._size += len(value)
            if self._over():
                for old in [k for k, (_, expires) in self._held.items() if expires is not None and expires <= now]:
                    self._drop(old)
            while self._over():
                self._drop(next(iter(self._held)))

    async def delete(self, tenant: str, key: str) -> None:
        """Forget the key; no error when it is not there."""
        with self._lock:
            self._drop((tenant, key))

    async def aclose(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self._size = 0

    def _over(self) -> bool:
        return self._size > self._max_bytes or len(self._held) > self._max_entries

    def _drop(self, entry: tuple[str, str]) -> None:
        gone = self._held.pop(entry, None)
        if gone is not None:
            self._size -= len(gone[0])

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self._held)} values, {self._size} bytes>"


class FolderStore:
    """Keeps values as files, readable by their owner only. Several processes may share the folder.

    File names are hashes: nothing of a tenant, a key or a content is ever part of a path. A file is written
    whole or not at all; one that was damaged is noticed by its checksum, removed, and reads as missing.

    Args:
        path: the folder; it is made (mode 0700) when it does not exist.
        max_bytes: bound on the size of all files; the oldest go first.
        ttl: seconds that a value lives when ``put`` names none, ``None`` for as long as it fits.
        clock: seconds since the epoch: shared with other processes, so not monotonic.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 2**30,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,  # noqa: TID251 (the default of what is injected)
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ConfigurationError(f"path={path!r}: expected the path of a folder")
        self._root = Path(path)
        if self._root.exists() and not self._root.is_dir():
            raise ConfigurationError(f"path={str(path)!r}: is not a folder")
        self._max_bytes = _bound("max_bytes", max_bytes)
        self._ttl = _check_ttl(ttl)
        self._clock = clock
        self._lock = threading.Lock()
        self._size: int | None = None
        self._writes = 0

    async def get(self, tenant: str, key: str) -> bytes | None:
        """The value, or ``None`` where there is none (any more), or the file was damaged.

        Raises:
            StoreError: when the folder cannot be read.
        """
        return await _in_thread(self._get, tenant, key)

    async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Keep a value, atomically.

        Raises:
            StoreError: when it alone is larger than the store, or the folder cannot be written.
        """
        if len(value) > self._max_bytes:
            raise StoreError(f"value of {len(value)} bytes is larger than max_bytes={self._max_bytes}")
        await _in_thread(self._put, tenant, key, bytes(value), self._ttl if ttl is None else ttl)

    async def delete(self, tenant: str, key: str) -> None:
        """Forget the key; no error when it is not there."""
        await _in_thread(self._delete, tenant, key)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _file(self, tenant: str, key: str) -> Path:
        return self._root / _name(tenant) / _name(key)

    def _get(self, tenant: str, key: str) -> bytes | None:
        file = self._file(tenant, key)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"store folder cannot be read: {error.strerror or error}") from error
        value, expires = _unpack(data, key)
        if value is None or (expires is not None and expires <= self._clock()):
            self._forget(file, len(data))
            return None
        return value

    def _put(self, tenant: str, key: str, value: bytes, ttl: float | None) -> None:
        file = self._file(tenant, key)
        data = _pack(value, key, None if ttl is None else self._clock() + ttl)
        try:
            for folder in (self._root, file.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkstemp makes it readable by its owner only
            handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(data)
                os.replace(temporary, file)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise StoreError(f"store folder cannot be written: {error.strerror or error}") from error
        with self._lock:
            self._writes += 1
            self._size = None if self._size is None else self._size + len(data)
            if self._size is None or self._size > self._max_bytes or self._writes % _REMEASURE == 0:
                self._size = self._evict(file)

    def _delete(self, tenant: str, key: str) -> None:
        try:
            self._file(tenant, key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"store folder cannot be written: {error.strerror or error}") from error

    def _forget(self, file: Path, size: int) -> None:
        try:
            file.unlink(missing_ok=True)
        except OSError:
            return  # read-only: it reads as missing all the same
        with self._lock:
            self._size = None if self._size is None else max(0, self._size - size)

    def _evict(self, newest: Path) -> int:
        """Measure the folder; remove its oldest files until it is within the bound. Returns what is left."""
        files: list[tuple[float, int, Path]] = []
        for file in self._root.glob("*/*"):
            try:
                stat = file.stat()
            except OSError:
                continue  # another process was faster
            if not file.name.startswith(".new-"):
                files.append((stat.st_mtime, stat.st_size, file))
            elif stat.st_mtime < self._clock() - _STALE_TEMPORARY:
                self._unlink(file)
        total = sum(size for _, size, _ in files)
        if total > self._max_bytes:
            for _, size, file in sorted(files, key=lambda f: (f[2] == newest, f[0])):
                if total <= self._max_bytes * 0.9 or file == newest:
                    break
                if self._unlink(file):
                    total -= size
        return total

    @staticmethod
    def _unlink(file: Path) -> bool:
        try:
            file.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<FolderStore {str(self._root)!r}>"


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def _checksum(key: str, head: bytes, value: bytes) -> bytes:
    seal = hashlib.blake2b(key.encode("utf-8", "surrogatepass") + b"\0" + head, digest_size=16)
    seal.update(value)
    return seal.hexdigest().encode()


def _pack(value: bytes, key: str, expires: float | None) -> bytes:
    head = b"-" if expires is None else repr(float(expires)).encode()
    return b" ".join([_MAGIC, _checksum(key, head, value), head]) + b"\n" + value


def _unpack(data: bytes, key: str) -> tuple[bytes | None, float | None]:
    """Value and expiry; ``(None, None)`` for a file that is not what was written."""
    line, newline, value = data.partition(b"\n")
    parts = line.split(b" ")
    if not newline or len(parts) != 3 or parts[0] != _MAGIC or parts[1] != _checksum(key, parts[2], value):
        return None, None
    return value, None if parts[2] == b"-" else float(parts[2])


def _bound(option: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{option}={value!r}: expected a whole number above 0")
    return value


def _check_ttl(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ConfigurationError(f"ttl={value!r}: expected a number of seconds above 0, or None")
    return None if value is None else float(value)

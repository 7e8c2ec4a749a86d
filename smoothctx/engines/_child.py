"""The embedded engine's process, seen from the process that owns it: start, readiness, and a certain end.

However the owner ends, the child ends too: it is stopped by ``stop``, at garbage collection or at the interpreter's
exit; it sees the end of its stdin and of its parent when the owner is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from ..errors import EngineError

_PREFIX = "smoothctx-slots-"
#: seconds that the process gets to end by itself before it is killed
_GRACE_S = 2.0
#: free bytes below which the folder of saved slots is not put into shared memory
_SHM_FREE = 512 * 1024 * 1024


class Child:
    """One server process with its folder of saved slots.

    Args:
        settings: what ``_serve.py`` reads, less ``folder`` and ``parent``.

    Raises:
        EngineError: when no folder or process can be made.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.key = secrets.token_urlsafe(24)
        self.address: str | None = None
        self._owner = os.getpid()
        self._errors: deque[str] = deque(maxlen=40)
        self._lock = threading.Lock()
        self.folder, held = _folder()
        try:
            argument = json.dumps({**settings, "folder": self.folder, "parent": self._owner})
            # From the caller's own thread: Linux sends the parent's death signal when that thread ends.
            # A process group of its own: Ctrl-C reaches the owner alone.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("_serve.py")), argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(),
                pass_fds=(held,),
                process_group=0,
            )
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise EngineError(f"the embedded engine's process cannot be started: {error}") from error
        finally:
            os.close(held)
        self._readers = [
            threading.Thread(target=self._read_out, name="smoothctx-engine-out", daemon=True),
            threading.Thread(target=self._read_errors, name="smoothctx-engine-err", daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._send(self.key.encode() + b"\n")

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead already: its exit says so

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"READY "):
                self.address = line[6:].decode().strip()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.decode("utf-8", "replace").rstrip())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code (negative: the signal that ended it), ``None`` while it runs."""
        with self._lock:
            return self._process.poll()

    def errors(self) -> str:
        """The last lines that it printed on stderr."""
        return "\n".join(self._errors)

    async def ready(self, timeout_s: float) -> str:
        """Wait for the server's address.

        Raises:
            EngineError: when it died, or was not ready in time.
        """
        with anyio.move_on_after(timeout_s):
            while self.address is None:
                code = self.returncode
                if code is not None:
                    self._readers[1].join(1.0)
                    said = self.errors()
                    raise EngineError(
                        f"the embedded engine did not start (exit code {code})" + (f":\n{said}" if said else "")
                    )
                await anyio.sleep(0.02)
        if self.address is None:
            said = self.errors()
            raise EngineError(
                f"the embedded engine was not ready after {timeout_s:g} s: raise start_timeout_s, or take a smaller "
                "model" + (f"; it said:\n{said}" if said else "")
            )
        return self.address

    async def died(self, timeout_s: float) -> int | None:
        """The exit code, if it ends within ``timeout_s`` seconds."""
        with anyio.move_on_after(timeout_s):
            while self.returncode is None:  # noqa: ASYNC110  # a process gives no event that works on every loop
                await anyio.sleep(0.01)
        return self.returncode

    async def stop(self) -> None:
        """End the process and remove its folder, in bounded time. A cancelled caller waits for that too."""
        with anyio.CancelScope(shield=True):
            self._terminate()
            if await self.died(_GRACE_S) is None:
                self._kill()
                await self.died(_GRACE_S)
        self._clean()

    def stop_now(self) -> None:
        """The same for callers without an event loop (exit, garbage collection)."""
        if os.getpid() != self._owner:
            return  # a fork of the owner: not its process
        for end in (self._terminate, self._kill):
            end()
            try:
                with self._lock:
                    self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            break
        self._clean()

    def _terminate(self) -> None:
        if self.returncode is None:
            self._process.terminate()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass

    def _kill(self) -> None:
        if self.returncode is None:
            self._process.kill()

    def _clean(self) -> None:
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(1.0)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and self.returncode is not None:
                pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Ours, with a bound on how long compute threads spin at a barrier.

    Spinning for ever, the default, collapses where other programs share the cores. Measured with two busy ones on
    two cores: 3.3 s instead of 4.4 s for 300 tokens, 16 instead of 5 tokens/s; on idle cores it costs some 5%.
    """
    own = dict(os.environ)
    if "OMP_WAIT_POLICY" not in own:
        own.setdefault("GOMP_SPINCOUNT", "10000")
    return own


def _folder() -> tuple[str, int]:
    """A private folder for saved slots, and the descriptor that marks it as in use while anybody holds it."""
    where = _place()
    _sweep(where)
    while True:
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=where)
        except OSError as error:
            raise EngineError(f"the embedded engine cannot make a folder for its slots in {where}: {error}") from error
        try:
            held = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # swept by another process before we marked it
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            continue
        if os.path.isdir(folder):
            return folder, held
        os.close(held)


def _place() -> str:
    """Shared memory where there is room for it (a slot is copied in milliseconds), else the temporary folder."""
    shm = "/dev/shm"
    try:
        if os.access(shm, os.W_OK | os.X_OK) and shutil.disk_usage(shm).free >= _SHM_FREE:
            return shm
    except OSError:
        pass
    return tempfile.gettempdir()


def _sweep(where: str) -> None:
    """Remove folders whose owner and child were both killed: nobody holds their mark."""
    for path in Path(where).glob(_PREFIX + "*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            held = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(held)

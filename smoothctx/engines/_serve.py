"""The embedded engine's process: llama.cpp's own server, ended with the process that started it.

It is run as a file, so that it needs nothing of smoothctx and starts fast. ``argv[1]`` holds its settings as JSON;
the first line on stdin is the key that callers must present. Once the model is loaded it prints one line,
``READY <address>``, and then waits for the end of stdin, for SIGTERM, or for its parent to be gone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import sys
from typing import Any

#: seconds between two looks at the parent, where neither the end of stdin nor a signal told of its end
_LOOK_S = 1.0
#: Linux's prctl option that sends a signal when the parent's thread that started us ends
_PR_SET_PDEATHSIG = 1


def _orphaned(parent: int) -> bool:
    return os.getppid() != parent


def _follow(parent: int) -> None:
    """Let the kernel tell us of the parent's end, where it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)


def _load(settings: dict[str, Any], key: str) -> Any:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    slots, threads = settings["slots"], settings["threads"]
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]  # a web page in the user's browser can reach this port too
    params.n_parallel = slots
    params.n_ctx = slots * settings["context_window"]
    # Small batches bound what a foreground call waits for a background prefill, and how fast that one aborts.
    params.n_batch = params.n_ubatch = settings["batch"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_threads_http = slots + 16  # a queued call holds one
    params.swa_full = True  # else a changed middle loses the shared head too
    params.kv_unified = False
    params.cache_ram_mib = 0
    params.fit_params = False
    params.ui = False
    params.offline = True
    params.verbosity = 1
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.slot_save_path = os.path.join(settings["folder"], "")
    if settings["chat_template"]:
        params.chat_template = settings["chat_template"]
        params.use_jinja = False
    return xllamacpp.Server(params)


def main() -> None:
    """Serve until the parent lets go of us."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    parent, folder = settings["parent"], settings["folder"]

    def leave(*_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # the server has no stop, and its threads must not hold the interpreter

    def look(*_: object) -> None:
        if _orphaned(parent):  # else only the thread that started us has ended
            leave()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow(parent)
    key = sys.stdin.buffer.readline().strip().decode()
    if _orphaned(parent) or not key:
        leave()
    ready = os.dup(1)
    os.dup2(2, 1)  # whatever llama.cpp prints is no answer to the parent
    # Loading holds the interpreter's lock: no handler would run, so both signals end us there as they are.
    try:
        server = _load(settings, key)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.stderr.flush()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR1, look)
    try:
        os.write(ready, f"READY {server.listening_address}\n".encode())
    except OSError:
        leave()
    while not _orphaned(parent):
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable and not os.read(0, 4096):
            break
    leave()


if __name__ == "__main__":
    main()

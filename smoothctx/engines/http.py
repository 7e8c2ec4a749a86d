"""HTTP: a model server at a URL, on whatever event loop it is asked from; every fault becomes an ``EngineError``."""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from ..errors import ClosedError, ConfigurationError, EngineProtocolError, MessageError
from .wire import Answer, is_url, raise_for_status, unreachable

#: bytes of an answer that are read where only a part of it matters
_ANSWER = 8 * 1024 * 1024
#: a name and a password in a URL
_USER = re.compile(r"(?<=://)[^/?#\s]*@")


def without_user(url: str) -> str:
    """A URL as it may be shown: without a name and a password."""
    return _USER.sub("", url)


class Server:
    """A server below ``root``. A name and a password in the URL are used (HTTP basic authentication) and never shown:
    they are in no ``root``, ``url``, identity or error. A client belongs to the loop that its connections were made on,
    this to every loop.

    Raises:
        ConfigurationError: when the URL, the key or the timeout cannot be right.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None, timeout_s: float, client: httpx.AsyncClient | None
    ) -> None:
        if not isinstance(base_url, str) or not is_url(base_url):
            shown = base_url.rpartition("@")[2] if isinstance(base_url, str) else base_url  # no password of it
            raise ConfigurationError(f"base_url={shown!r}: expected http://host:port or https://host, /v1 or not")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigurationError(f"timeout_s={timeout_s!r}: expected seconds above 0")
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise ConfigurationError("api_key: expected printable ASCII without line breaks (its value is not shown)")
        self.root = without_user(base_url).rstrip("/").removesuffix("/v1").rstrip("/")
        self.url = f"{self.root}/v1"
        self._given = client
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._clients = weakref.WeakKeyDictionary()
        self._closed = False
        self._trust_env = True
        self._timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        given = httpx.URL(base_url)
        if given.userinfo:  # it goes before a key, as in httpx
            login = b64encode(f"{given.username}:{given.password}".encode()).decode()
            self._headers = {"Authorization": f"Basic {login}"}

    async def fetch(self, path: str) -> Answer:
        """GET a path below the server's root, whatever the answer's status; cut at 8 MiB.

        Raises:
            EngineUnreachable: when there is no answer.
        """
        client = self._http()
        request = client.build_request("GET", f"{self.root}{path}", headers=self._headers)
        return await self._answer(client, request)

    async def send(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST JSON to a path below the server's root, whatever the answer's status; cut at 8 MiB.

        Raises:
            EngineUnreachable: when there is no answer.
        """
        client = self._http()
        headers = {"Content-Type": "application/json", **self._headers}
        request = client.build_request("POST", f"{self.root}{path}", content=_json(body), headers=headers)
        return await self._answer(client, request)

    async def _answer(self, client: httpx.AsyncClient, request: httpx.Request) -> Answer:
        try:
            response = await _send(client, request)
            try:
                data = b""
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > _ANSWER:
                        break
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        return Answer(response.status_code, data.decode("utf-8", "replace"), response.headers)

    async def get_json(self, path: str) -> Any:
        """GET a path below the server's root.

        Raises:
            EngineError: see its subclasses.
        """
        answer = await self.fetch(path)
        raise_for_status(self.url, answer.status, answer.text, answer.headers)
        try:
            return json.loads(answer.text)
        except (ValueError, RecursionError) as error:
            raise EngineProtocolError(f"{self.root}{path}: the answer is not JSON") from error

    async def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON to a path below the server's root, and read JSON back.

        Raises:
            EngineError: see its subclasses.
        """
        async with self._post(path, body) as response:
            try:
                return json.loads(await response.aread())
            except (ValueError, RecursionError) as error:
                raise EngineProtocolError(f"{self.root}{path}: the answer is not JSON") from error
            except httpx.HTTPError as error:
                raise unreachable(self.url, error) from error

    def check_open(self) -> None:
        """Raise ``ClosedError`` after ``aclose``."""
        if self._closed:
            raise ClosedError(f"{self!r} was closed")

    async def aclose(self) -> None:
        """Close the connections that this client opened on the running loop, and refuse further calls."""
        self._closed = True
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connections of the running loop, before it ends; another loop, or a later call, opens its own."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _http(self) -> httpx.AsyncClient:
        self.check_open()
        if self._given is not None:
            return self._given
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            limits = httpx.Limits(max_connections=256, max_keepalive_connections=32)
            client = httpx.AsyncClient(
                timeout=self._timeout,
                limits=limits,
                trust_env=self._trust_env,
                verify=self.root.startswith("https://"),  # loading certificates takes a while
            )
            self._clients[loop] = client
        return client

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx.Response]:
        client = self._http()
        content = _json(body)
        headers = {"Content-Type": "application/json", **self._headers}
        request = client.build_request("POST", f"{self.root}{path}", content=content, headers=headers)
        try:
            response = await _send(client, request)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        try:
            if response.status_code != 200:
                try:
                    text = (await response.aread()).decode("utf-8", "replace")
                except httpx.HTTPError:
                    text = ""
                raise_for_status(self.url, response.status_code, text, response.headers)
            yield response
        finally:
            await response.aclose()


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"a message or option cannot be written as JSON: {error}") from error
    # Half a surrogate pair is no UTF-8: servers answer it with errors of every kind.
    return text.encode("utf-8", "replace")


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Send it, and once more where a kept connection turns out to be closed before any answer (RFC 9112, 9.3.1)."""
    try:
        return await client.send(request, stream=True)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
        if isinstance(error, httpx.RemoteProtocolError) and "without sending a response" not in str(error):
            raise
        return await client.send(request, stream=True)

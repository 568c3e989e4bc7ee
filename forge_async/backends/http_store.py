"""Versions over HTTP: the store's process serves them to whoever holds the run's token.

For hosts that share neither memory nor a folder, or lie behind a gateway. The token travels with the store's handle;
the connection itself is not encrypted, so over networks that others can read it belongs behind a proxy with TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import json
import secrets
import sys
import threading
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from forge_async.core.errors import WeightsError
from forge_async.weights.codec import decode, encode
from forge_async.weights.transports import HTTP

KIND, BLOB, OBJECT = "X-Kind", "blob", "object"
IDLE_S = 60.0
"""After so long without a byte a connection is given up, on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """Where the store listens, and what opens it."""

    host: str
    port: int
    token: str


class HttpServer:
    """The store's side: keys in this process's memory, answered on threads of their own."""

    def __init__(self, host: str) -> None:
        """`host` is the address to listen on, by which clients reach it."""
        self._server = _Server((host, 0), _Handler)
        self.address = HttpAddress(host=host, port=self._server.server_address[1], token=self._server.token)
        threading.Thread(target=self._server.serve_forever, name="weights-http", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and forget everything."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.token = secrets.token_hex(32)
        self.values: dict[str, tuple[str, bytearray]] = {}
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up or died is no error of the server; what it left half done is dropped with it."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_PUT(self) -> None:  # noqa: N802  http.server's name
        if not self._is_allowed():
            return
        body = bytearray(int(self.headers.get("Content-Length", 0)))
        if not _fill(self.rfile, memoryview(body)):
            self.close_connection = True  # the sender died: what came is not a value
            return
        with self.server.lock:
            self.server.values[self._key] = (self.headers.get(KIND, OBJECT), body)
        self._answer(204)

    def do_GET(self) -> None:  # noqa: N802
        if not self._is_allowed():
            return
        with self.server.lock:
            if self.path == "/":
                found = (OBJECT, bytearray(json.dumps(list(self.server.values)).encode()))
            else:
                found = self.server.values.get(self._key)
        if found is None:
            self._answer(404)
        else:
            self._answer(200, *found)

    def do_DELETE(self) -> None:  # noqa: N802
        if not self._is_allowed():
            return
        with self.server.lock:
            for key in [key for key in self.server.values if key.startswith(self._key)]:
                del self.server.values[key]
        self._answer(204)

    @property
    def _key(self) -> str:
        return urllib.parse.unquote(self.path[1:])

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        allowed = hmac.compare_digest(given, f"Bearer {self.server.token}".encode())
        if not allowed:
            self.close_connection = True  # whatever it goes on to send
            self._answer(401)
        return allowed

    def _answer(self, status: int, kind: str = OBJECT, body: bytearray | None = None) -> None:
        self.send_response(status)
        self.send_header(KIND, kind)
        if status != 204:
            self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Not a line for every request."""


class HttpStore:
    """A client of the server."""

    transport = HTTP

    def __init__(self, address: HttpAddress, timeout_s: float = 120.0) -> None:
        """`timeout_s` limits each wait for the server to go on."""
        self._address, self._timeout_s = address, timeout_s

    @property
    def carried_by(self) -> str:
        return self.transport.name

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    async def put(self, items: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        for key, value in items.items():
            is_blob = isinstance(value, torch.Tensor)
            body = value.numpy().data if is_blob else encode(value)
            await asyncio.to_thread(self._ask, "PUT", key, body, BLOB if is_blob else OBJECT)
        for prefix in forget:
            await self.delete(prefix)

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        yield [await asyncio.to_thread(self._ask, "GET", key) for key in keys]

    async def delete(self, prefix: str) -> None:
        await asyncio.to_thread(self._ask, "DELETE", prefix)

    async def keys(self) -> list[str]:
        return await asyncio.to_thread(self._ask, "GET", "", None, "keys")

    async def close(self) -> None:
        """Nothing is held."""

    def _ask(self, method: str, key: str, body: Any = None, kind: str = OBJECT) -> Any:
        address = self._address
        connection = http.client.HTTPConnection(address.host, address.port, timeout=self._timeout_s)
        headers = {"Authorization": f"Bearer {address.token}", KIND: kind}
        try:
            connection.request(method, "/" + urllib.parse.quote(key), body, headers)
            response = connection.getresponse()
            if response.status == 404:
                raise KeyError(key)
            if response.status not in (200, 204):
                raise WeightsError(f"The weight store refuses {method} of {key}: {response.status} {response.reason}.")
            return None if response.status == 204 else _received(response, kind)
        except (OSError, http.client.HTTPException) as error:
            raise WeightsError(
                f"The weight store at http://{address.host}:{address.port} does not answer ({error}); it has ended, or "
                "weights.http_host is not an address by which this host reaches it."
            ) from error
        finally:
            connection.close()


def _received(response: http.client.HTTPResponse, kind: str) -> Any:
    if kind == "keys":
        return json.loads(response.read())
    if response.headers[KIND] == OBJECT:
        return decode(response.read())
    blob = torch.empty(int(response.headers["Content-Length"]), dtype=torch.uint8)
    if not _fill(response, blob.numpy().data):
        raise WeightsError("The weight store ended in the middle of a blob; pull again.")
    return blob


def _fill(source: Any, view: memoryview) -> bool:
    """Read until the view is full; False when the source ends before."""
    while view:
        if not (got := source.readinto(view)):
            return False
        view = view[got:]
    return True

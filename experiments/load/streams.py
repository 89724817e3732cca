"""Answers that a server streams, over HTTP/1.1 on asyncio's own streams.

General clients need one to several milliseconds of Python per request, in which no other request can leave: with 400 a
second, a hundredth of them left half a second late. A connection per request and a few lines of parsing leave in time.
"""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import httpx

_PIECE = 1 << 16


class RefusedError(Exception):
    """The server has answered with an error."""


class Streams:
    """Posts requests, each on a connection of its own, which is closed when the caller reads no further."""

    def __init__(self, url: httpx.URL, headers: Mapping[str, str]):
        secure = url.scheme == "https"
        self._port = url.port or (443 if secure else 80)
        # Looked up once, as every connection would do it again in a thread.
        self._host = str(socket.getaddrinfo(url.host, self._port, type=socket.SOCK_STREAM)[0][4][0])
        self._secure = {"ssl": ssl.create_default_context(), "server_hostname": url.host} if secure else {}
        lines = {"Host": url.netloc.decode(), "Content-Type": "application/json", "Connection": "close", **headers}
        more = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._head = f"POST {url.raw_path.decode()} HTTP/1.1\r\n{more}Content-Length: ".encode()

    async def post(self, body: bytes, sent: Callable[[], object]) -> AsyncGenerator[tuple[float, bytes]]:
        """Yield the data of every event of an answer with the time at which it came.

        Args:
            sent: Is called when the request has left this process.

        Raises:
            RefusedError: The server answers with an error, or with something else than events.
            OSError: There is no connection.
            EOFError: The connection has ended before the answer.
        """
        reader, writer = await asyncio.open_connection(self._host, self._port, **self._secure)
        try:
            writer.write(self._head + b"%d\r\n\r\n" % len(body) + body)
            await writer.drain()
            sent()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *lines = head.split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
            pieces = _pieces(reader, chunked=fields.get("transfer-encoding") == "chunked")
            if status.split()[1] != "200" or "event-stream" not in fields.get("content-type", ""):
                raise RefusedError(
                    f"HTTP {' '.join(status.split()[1:])}: {message(b''.join([each async for each in pieces]))}"
                )
            rest = b""
            async for piece in pieces:
                now = time.perf_counter()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield now, line[5:].strip()
        finally:
            writer.close()


async def _pieces(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    while chunked and (size := int((await reader.readuntil(b"\n")).split(b";")[0], 16)):
        yield (await reader.readexactly(size + 2))[:-2]
    while not chunked and (piece := await reader.read(_PIECE)):
        yield piece


def message(answer: bytes) -> str:
    """Return what an error says, in OpenAI's form or any other."""
    try:
        found = json.loads(answer)
        found = found.get("error", found)
        text = str(found.get("message", found))
    except (ValueError, AttributeError, TypeError):
        text = answer.decode("utf-8", "replace")
    return " ".join(text.split())[:200]

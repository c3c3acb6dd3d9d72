"""A proxy that adds a latency to each request: `python slow_proxy.py UPSTREAM_PORT LATENCY_MS`.

Prints its port, then runs until it is killed. `GET /proxied` tells how many requests and bytes of objects went through.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys


class SlowProxy:
    """Forwards HTTP/1.1 with keep-alive to a port of this machine."""

    def __init__(self, upstream: int, latency_s: float) -> None:
        self._upstream = upstream
        self._latency_s = latency_s
        self._requests = 0
        self._bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_length(head) or 0)
                if head.startswith(b"GET /proxied "):
                    text = json.dumps({"requests": self._requests, "bytes": self._bytes}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                    continue
                self._requests += 1
                await asyncio.sleep(self._latency_s)
                there = there or await asyncio.open_connection("127.0.0.1", self._upstream, limit=1 << 20)
                there[1].write(head + body)
                await self._reply(there[0], writer, is_object=b"alt=media" in head.split(b"\r\n")[0])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            for one in (writer, *(there or ())[1:]):
                one.close()

    async def _reply(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, is_object: bool) -> None:
        head = await there.readuntil(b"\r\n\r\n")
        writer.write(head)
        length = _length(head)
        if length is not None:
            while length:
                data = await there.read(min(length, 1 << 20))
                writer.write(data)
                length -= len(data)
                self._bytes += len(data) * is_object
        elif b"chunked" in head.lower():
            while True:
                line = await there.readline()
                data = await there.readexactly(int(line, 16) + 2)
                writer.write(line + data)
                self._bytes += (len(data) - 2) * is_object
                if len(data) == 2:
                    return


def _length(head: bytes) -> int | None:
    found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else None


async def main(upstream: int, latency_ms: float) -> None:
    """Serve for ever."""
    proxy = SlowProxy(upstream, latency_ms / 1000)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))

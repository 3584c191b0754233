"""A reverse proxy that passes everything on and keeps what the server said about each answer."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
_HOP_HEADERS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass(slots=True)
class Exchange:
    """One POST and what its answer, plain or streamed, said of itself."""

    path: str
    body: Json
    status: int = 0
    answer: Json = field(default_factory=dict)  # id, usage and relay, as far as they came
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def output(self) -> range:
        """Token positions of the generated text in the request's recording."""
        usage = self.answer["usage"]  # chat completions and responses name its fields differently
        start = int(usage.get("prompt_tokens", usage.get("input_tokens")))
        count = int(usage.get("completion_tokens", usage.get("output_tokens")))
        return range(start, start + count)

    def num_relayed_from(self, source: Exchange) -> int:
        """How many tokens that `source` generated were relayed into this prompt."""
        output, count = source.output, 0
        for segment in self.answer["relay"]["segments"]:
            if segment["source_request_id"] == source.answer["id"]:
                start = segment["source_start"]
                stop = start + segment["stop"] - segment["start"]
                count += len(range(max(start, output.start), min(stop, output.stop)))
        return count


class RecordingProxy(ThreadingHTTPServer):
    """Asks of every answer in a session to list its segments; changes nothing else."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        self._exchanges: list[Exchange] = []

    def add(self, exchange: Exchange) -> None:
        """Keeps an exchange that begins."""
        self._exchanges.append(exchange)

    def exchanges(self) -> list[Exchange]:
        """All POSTs in order of arrival, once they are over: a client may know it first."""
        return [exchange for exchange in self._exchanges if exchange.is_over.wait(10)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def recording_proxy(target: str) -> Iterator[RecordingProxy]:
    """A proxy in front of the server at `target`, in a thread."""
    with RecordingProxy(target) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordingProxy

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        body: Json = json.loads(data)
        exchange = Exchange(self.path, body)
        self.server.add(exchange)
        relay = {**(body.get("relay") or {}), "explain": True}
        received = self._pass_on(json.dumps({**body, "relay": relay}).encode(), exchange)
        for part in _json_parts(received):
            part = part.get("response", part)  # an event of a streamed response holds it
            exchange.answer.update({k: v for k, v in part.items() if v and k in _KEPT})
        exchange.is_over.set()

    def do_GET(self) -> None:
        self._pass_on(b"", Exchange(self.path, {}))

    do_DELETE = do_GET  # noqa: N815

    def _pass_on(self, data: bytes, exchange: Exchange) -> bytes:
        """Asks the server and sends its answer on as it comes; returns the answer's body."""
        upstream = http.client.HTTPConnection(self.server.target, timeout=600)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_HEADERS}
        upstream.request(self.command, self.path, data, headers)
        response = upstream.getresponse()
        exchange.status = response.status
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        received = b""
        while piece := response.read1(65536):
            received += piece
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")
        upstream.close()
        return received

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""


_KEPT = ("id", "usage", "relay", "error")


def _json_parts(received: bytes) -> Iterator[Json]:
    """The JSON object of a plain answer, or of every event of a streamed one."""
    text = received.decode()
    if text.startswith("{"):
        yield json.loads(text)
        return
    for line in text.splitlines():
        event = line.removeprefix("data:").strip()
        if line.startswith("data:") and event != "[DONE]":
            yield json.loads(event)

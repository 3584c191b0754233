"""A stand-in for `relaykv serve`: the same answers on the wire, no model behind them.

A token is a run of non-space characters. Run as a script it takes `serve`'s arguments; the
environment variable FAKE_SERVER chooses how it misbehaves (see `main`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Json = dict[str, Any]


class FakeServer(ThreadingHTTPServer):
    """Counts a known system prompt as prefix and, in a session, earlier answers as relayed."""

    daemon_threads = True

    def __init__(self, port: int = 0, *, behaviour: str = "") -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.behaviour = behaviour
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.requests: list[Json] = []  # chat bodies in order of arrival
        self.known_roles: set[str] = set()
        self.answers: dict[str, list[str]] = {}  # by session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        path, _ = _split_path(self.path)
        if path == "/v1/models":
            self._send(200, {"object": "list", "data": [_MODEL]})
        elif path == "/ready":
            ready = time.monotonic() - self.server.started > 0.5
            if self.server.behaviour == "never ready":
                ready = False
            self._send(200 if ready else 503, {"ready": ready})
        else:
            self._send(404, _error(f"no route {self.path}"))

    def do_POST(self) -> None:
        body: Json = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path, session = _split_path(self.path)
        if session is not None:
            body.setdefault("relay_session", session)
        if path == "/tokenize":
            text = body["text"] if "text" in body else _rendered(body["messages"])
            tokens = text.split()
            self._send(200, {"count": len(tokens), "tokens": list(range(len(tokens)))})
        elif path == "/v1/chat/completions":
            self._chat(body)
        else:
            self._send(404, _error(f"no route {self.path}"))

    def _chat(self, body: Json) -> None:
        with self.server.lock:
            self.server.requests.append(body)
            index = len(self.server.requests)
            usage, relay = _account(self.server, body, index)
        if self.server.behaviour == "refuses" and "relay_session" in body:
            self._send(400, _error("sessions are refused here"))
            return
        if self.server.behaviour == "dies" and "relay_session" in body:
            print("out of blocks, out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._chunk([_choice({"role": "assistant", "content": ""})])
        words = _answer(index, body["max_tokens"]).split(" ")
        for number, word in enumerate(words):
            self._chunk([_choice({"content": word if number == 0 else f" {word}"})])
        if self.server.behaviour == "cuts off":
            return
        extra = {} if relay is None else {"relay": relay}
        self._chunk([_choice({}, "length")], extra)
        self._chunk([], {"usage": usage, **extra})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, choices: list[Json], extra: Json | None = None) -> None:
        chunk = {
            "id": "chatcmpl-0",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": _MODEL["id"],
            "choices": choices,
            **(extra or {}),
        }
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def _send(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing: requests are kept in `FakeServer.requests`."""


_MODEL: Json = {"id": "fake-model", "object": "model", "created": 0, "owned_by": "tests"}


def _split_path(path: str) -> tuple[str, str | None]:
    """A path without its session prefix, and the session."""
    if not path.startswith("/s/"):
        return path, None
    session, _, rest = path.removeprefix("/s/").partition("/")
    return f"/{rest}", unquote(session)


def _error(message: str) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None}}


def _choice(delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _rendered(messages: list[Json]) -> str:
    return " ".join(f"<{message['role']}> {message['content']}" for message in messages)


def _answer(index: int, num_tokens: int) -> str:
    return " ".join(f"answer{index}word{number}" for number in range(num_tokens))


def _account(server: FakeServer, body: Json, index: int) -> tuple[Json, Json | None]:
    """The usage and the relay object of a request, and what it leaves behind."""
    messages = body["messages"]
    total = len(_rendered(messages).split())
    role = messages[0]["content"]
    prefix = len(role.split()) + 1 if role in server.known_roles else 0
    server.known_roles.add(role)
    num_output_tokens = body["max_tokens"]
    usage: Json = {
        "prompt_tokens": total,
        "completion_tokens": num_output_tokens,
        "total_tokens": total + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": prefix},
    }
    session = body.get("relay_session")
    if session is None:
        return usage, None
    wanted = body.get("relay", {})
    policy = wanted.get("policy", "relay")
    answers = server.answers.setdefault(session, [])
    found = 0
    if policy != "full":
        text = _rendered(messages)
        found = sum(len(answer.split()) for answer in answers if answer in text)
    recomputed = found // 4 if policy == "relay" else 0
    if wanted.get("store", True):
        answers.append(_answer(index, num_output_tokens))
    usage["prompt_tokens_details"]["cached_tokens"] = prefix + found - recomputed
    tokens = {
        "prefix": prefix,
        "relayed": found - recomputed,
        "recomputed": recomputed,
        "computed": total - prefix - found,
    }
    share = 0.2 if recomputed else 0.0
    relay = {"policy": policy, "session": session, "tokens": tokens, "recomputed_share": share}
    return usage, relay


def main() -> None:
    """Serves until killed, as FAKE_SERVER says: "" (well), "never ready", "fails" (at start),
    "cuts off" (every stream), "refuses" or "dies" (both at the first request with a session).
    FAKE_SERVER_PID names a file for the process id.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    behaviour = os.environ.get("FAKE_SERVER", "")
    if "FAKE_SERVER_PID" in os.environ:
        with open(os.environ["FAKE_SERVER_PID"], "w") as file:
            file.write(str(os.getpid()))
    print(f"downloading {options.model}", file=sys.stderr, flush=True)
    print("a line about something else", file=sys.stderr, flush=True)
    if behaviour == "fails":
        sys.exit("error: the checksum is wrong")
    FakeServer(options.port, behaviour=behaviour).serve_forever()


if __name__ == "__main__":
    main()

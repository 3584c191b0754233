"""A RelayKV server that lives as long as the program which needs it."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import httpx

SERVER_COMMAND = (sys.executable, "-m", "relaykv.server.cli")

_NEWS = re.compile(r"download|convert|pull|load|checksum|sha256", re.IGNORECASE)
_PROGRESS_BAR = re.compile(r"\d+%\|")
_POLL_S = 0.2
_HEARTBEAT_S = 10.0  # something is printed at least this often while a server loads
_PROGRESS_BAR_S = 3.0  # a progress bar redraws far more often than is worth a line
_STOP_S = 10.0  # between SIGTERM and SIGKILL
_DEATH_S = 0.5  # a dying server closes its connections a moment before it is gone
_NUM_TAIL_LINES = 30


class ServerError(RuntimeError):
    """The server did not start, did not become ready, or went away."""


def is_loopback(url: str) -> bool:
    """Whether `url` points at this machine, so that a proxy must not be asked."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def root_url(url: str) -> str:
    """`url` without a trailing slash and without a trailing /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@contextlib.contextmanager
def running_server(
    url: str | None,
    *,
    command: Sequence[str] = SERVER_COMMAND,
    model: str = "default",
    timeout_s: float = 900.0,
    report: Callable[[str], None] = print,
) -> Iterator[str]:
    """Yields the root URL of a ready server: the one at `url`, or a new one when it is None.

    A new server is stopped on the way out, whatever the reason.

    Raises:
        ServerError: the server could not be started, reached or made ready in time.
    """
    if url is not None:
        root = root_url(url)
        _wait_for_running(root, timeout_s)
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="relaykv-") as folder:
        process = ServerProcess(command, model=model, log_path=Path(folder) / "server.log")
        try:
            process.start()
            process.wait_until_ready(timeout_s, report)
            yield process.url
        except ServerError:
            raise
        except Exception as error:
            process.raise_if_ended(error)
            raise
        finally:
            process.stop()


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt, so that context managers stop what they started.

    Only for the main thread.
    """

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class ServerProcess:
    """A server as a child process on a free loopback port, its output in a log file."""

    def __init__(self, command: Sequence[str], *, model: str, log_path: Path) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "serve", "--port", str(port), "--model", model]
        self._log = _LogFollower(log_path)
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; it is not ready yet.

        Raises:
            ServerError: the command cannot be run.
        """
        with self._log_path.open("wb") as log:
            try:
                # A session of its own: Ctrl-C in the terminal reaches only this program,
                # which then stops the server in order.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"cannot start the server: {error}") from error

    @property
    def pid(self) -> int | None:
        """Process id, or None before start()."""
        return None if self._process is None else self._process.pid

    def wait_until_ready(self, timeout_s: float, report: Callable[[str], None]) -> None:
        """Returns once GET /ready answers 200; reports what the server says meanwhile.

        Raises:
            ServerError: the process ended or `timeout_s` passed; the message ends with the
                log's last lines.
        """
        started = time.monotonic()
        last_report = last_bar = started
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while True:
                code = None if self._process is None else self._process.poll()
                now = time.monotonic()
                for line in self._log.new_lines():
                    is_bar = _PROGRESS_BAR.search(line) is not None
                    if not _NEWS.search(line) or (is_bar and now - last_bar < _PROGRESS_BAR_S):
                        continue
                    last_bar = now if is_bar else last_bar
                    last_report = now
                    report(f"  {line}")
                if code is not None:
                    raise self._error(f"the server ended with code {code} before it was ready")
                if _is_ready(http, self.url):
                    return
                if now - started > timeout_s:
                    raise self._error(f"the server was not ready after {timeout_s:.0f} s")
                if now - last_report >= _HEARTBEAT_S:
                    last_report = now
                    report(f"  still starting ({now - started:.0f} s)")
                time.sleep(_POLL_S)

    def raise_if_ended(self, cause: Exception) -> None:
        """Explains `cause` when the server has died behind it.

        Raises:
            ServerError: the process has ended; the message ends with the log's last lines.
        """
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_DEATH_S)
            raise self._error(f"the server ended with code {code} in mid-work") from cause

    def stop(self) -> None:
        """Ends the process: SIGTERM, then SIGKILL when it does not go. Safe to call twice."""
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_S)
        finally:  # also when a second Ctrl-C ends the wait
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _error(self, message: str) -> ServerError:
        tail = self._log.last_lines(_NUM_TAIL_LINES)
        if not tail:
            return ServerError(f"{message}; its log is empty")
        return ServerError("\n".join([f"{message}; the end of its log:", *tail]))


class _LogFollower:
    """Reads a growing log line by line; a carriage return ends a line too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0  # bytes already split into lines

    def new_lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(self._position)
            data = log.read()
        stop = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._position += stop
        return _split_log(data[:stop])

    def last_lines(self, count: int) -> list[str]:
        if not self._path.exists():
            return []
        return _split_log(self._path.read_bytes())[-count:]


def _split_log(data: bytes) -> list[str]:
    lines = re.split(r"[\r\n]+", data.decode(errors="replace"))
    return [line.rstrip() for line in lines if line.strip()]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _is_ready(http: httpx.Client, root: str) -> bool:
    try:
        return http.get(f"{root}/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _wait_for_running(root: str, timeout_s: float) -> None:
    """Waits for a server that somebody else started; it must at least answer at once."""
    give_up = time.monotonic() + timeout_s
    with httpx.Client(trust_env=not is_loopback(root), timeout=5.0) as http:
        while True:
            try:
                code = http.get(f"{root}/ready").status_code
            except (httpx.TransportError, httpx.InvalidURL) as error:
                raise ServerError(f"no server answers at {root}: {error}") from error
            if code == httpx.codes.OK:
                return
            if code != httpx.codes.SERVICE_UNAVAILABLE:
                raise ServerError(f"{root}/ready answered {code}: this is no RelayKV server")
            if time.monotonic() > give_up:
                raise ServerError(f"the server at {root} was not ready after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

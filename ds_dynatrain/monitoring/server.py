"""The monitoring server: answers GET requests for four paths, each in its own thread, from a view that the coordinator
makes.

A request may take only a few seconds and a few kilobytes, and only a few readers are served at a time. A slow or
hostile reader loses its own connection, and never delays the coordinator.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.messages import Shown
from ds_dynatrain.elastic.token import Reading
from ds_dynatrain.elastic.view import Feed, View
from ds_dynatrain.monitoring.metrics import encoded
from ds_dynatrain.monitoring.page import PAGE, POLICY

LARGEST_REQUEST = 8 * 1024
"""The maximum size of a request in bytes, headers included."""
READ_SECONDS = 5.0
WRITE_SECONDS = 10.0
MOST_READERS = 8
"""The maximum number of simultaneous readers; further ones are turned away."""
LEAST_SPACING = 0.005
"""The shortest time between two connections, in seconds, so that readers never occupy the whole interpreter."""
POLL_SECONDS = 0.2
END = b"\r\n\r\n"

logger = logging.getLogger("ds_dynatrain.elastic")

Answer = tuple[HTTPStatus, str, bytes]
"""The HTTP status, the content type, and the body of an answer."""


class Monitor:
    """HTTP server that shows a running job to its readers, from `start` to `stop`.

    Raises ElasticError under the same conditions as `Reading.listen`.
    """

    def __init__(self, reading: Reading) -> None:
        listener = reading.listen()
        self._server = _Server(listener, reading)
        self.port = int(listener.getsockname()[1])
        self._where, self._token_file = Address(reading.address.host, self.port), reading.token_file
        serve = partial(self._server.serve_forever, POLL_SECONDS)
        self._thread = threading.Thread(target=serve, name="dynatrain-monitor", daemon=True)

    def start(self, feed: Feed[View], ask: Callable[[str], Shown]) -> None:
        """Start a thread that serves the newest view (snapshot of the job) in `feed`.

        ask: asks a member what it is doing. Raises KeyError if there is no such member, TimeoutError if it does not
            answer.
        """
        self._server.feed, self._server.ask = feed, ask
        self._thread.start()
        logger.info("the job can be watched at http://%s/ with the token in %s", self._where, self._token_file)

    def stop(self) -> None:
        """Stop serving, without waiting for readers that are still being answered."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """HTTP server on a socket that is already listening."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, reading: Reading) -> None:
        super().__init__(listener.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.reading = listener, reading
        self.feed: Feed[View] | None = None
        self.ask: Callable[[str], Shown] | None = None
        self._places = threading.BoundedSemaphore(MOST_READERS)
        self._rendering = threading.Lock()
        self._rendered: dict[str, tuple[View, Answer]] = {}

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Always return True, after waiting `LEAST_SPACING` seconds, which limits the rate of connections."""
        time.sleep(LEAST_SPACING)
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it if `MOST_READERS` are already being served."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end, and make room for another reader after that."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level that a connection was broken."""
        logger.debug("monitoring: %s: the connection ended", client_address, exc_info=True)

    def answer(self, target: str, accept: str) -> Answer:
        """Return the answer for a path and its query. A view is rendered once for all of its readers."""
        path, _, query = target.partition("?")
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", PAGE
        if path == "/doing":
            return self._doing(unquote(query))
        if path not in PATHS:
            return HTTPStatus.NOT_FOUND, TEXT, b"there are /, /metrics, /status.json and /doing?MEMBER\n"
        view = None if self.feed is None else self.feed.read()
        if view is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"nothing is known yet\n"
        key = path if path != "/metrics" else f"{path} {'openmetrics' in accept}"
        with self._rendering:
            known = self._rendered.get(key)
            if known is None or known[0] is not view:
                known = view, (HTTPStatus.OK, *PATHS[path](view, accept))
                self._rendered[key] = known
            return known[1]

    def _doing(self, member: str) -> Answer:
        """Return an answer that says what a member is doing, as plain text, so that no browser reads it as HTML."""
        try:
            said = None if self.ask is None else self.ask(member)
        except KeyError:
            said = None
        except (TimeoutError, futures.TimeoutError):
            return (
                HTTPStatus.GATEWAY_TIMEOUT,
                TEXT,
                b"the member does not answer; it may be dead, or hold Python's lock\n",
            )
        if said is None:
            return HTTPStatus.NOT_FOUND, TEXT, b"there is no such member\n"
        lines = "\n".join(said.lines) or "no line yet"
        return HTTPStatus.OK, TEXT, f"{member}\n\nLast log lines\n\n{lines}\n\nStacks\n\n{said.stacks}\n".encode()


TEXT = "text/plain; charset=utf-8"


PATHS: dict[str, Callable[[View, str], tuple[str, bytes]]] = {
    "/metrics": encoded,
    "/status.json": lambda view, accept: ("application/json", view.model_dump_json().encode()),
}
"""Map from each path that shows the view to the function that renders its content type and body."""


class _Request(BaseHTTPRequestHandler):
    """Handler of one request on one connection."""

    server: _Server
    server_version, sys_version = "ds-dynatrain", ""

    def setup(self) -> None:
        """Read the headers of the request. A request that takes longer than `READ_SECONDS` in all raises
        TimeoutError."""
        super().setup()
        self.rfile.close()
        self._said = _head(self.connection)
        self.rfile = BytesIO(self._said)  # only its readline is used
        self.connection.settimeout(WRITE_SECONDS)  # sendall's limit for all bytes together

    def handle(self) -> None:
        """Answer the request, or send an error if its headers are incomplete or too long."""
        if END in self._said:
            self.handle_one_request()
        elif self._said:
            self.requestline = self.command = ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def parse_request(self) -> bool:
        """Accept only GET requests with the readers' token; answer any other request with an error."""
        self.close_connection = True
        if not super().parse_request():
            return False
        self.close_connection = True
        if self.command != "GET":
            self._say((HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"only GET\n"), Allow="GET")
            return False
        if not self.server.reading.permits(self.headers.get("Authorization", "")):
            ask = {"WWW-Authenticate": 'Basic realm="ds-dynatrain: any name, and the token", charset="UTF-8"'}
            self._say((HTTPStatus.UNAUTHORIZED, TEXT, b"the token is missing or another one\n"), **ask)
            return False
        return True

    def do_GET(self) -> None:
        """Answer a permitted request."""
        self._say(self.server.answer(self.path, self.headers.get("Accept", "")))

    def _say(self, answer: Answer, **more: str) -> None:
        status, content_type, body = answer
        self.request_version = "HTTP/1.0"  # a request without a version would get no headers
        self.send_response(status)
        fixed = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Content-Security-Policy": POLICY}
        headers = {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}
        for name, value in {**headers, **fixed, "Referrer-Policy": "no-referrer", **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send only the phrase of an HTTP error, without repeating any part of the request."""
        self._say((HTTPStatus(code), TEXT, f"{HTTPStatus(code).phrase}\n".encode()))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, so that readers cannot fill the log."""


def _head(connection: socket.socket) -> bytes:
    """Return a request up to the end of its headers, or its first `LARGEST_REQUEST` bytes.

    Raises TimeoutError if the request does not arrive in time.
    """
    end, said = time.monotonic() + READ_SECONDS, b""
    while END not in said and len(said) < LARGEST_REQUEST:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("a request that does not end")
        connection.settimeout(left)
        part = connection.recv(LARGEST_REQUEST - len(said))
        if not part:
            break
        said += part
    return said

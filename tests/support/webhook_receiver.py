"""A receiver of webhooks in a thread of the test."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class WebhookReceiver:
    """A receiver on loopback that answers with these statuses in turn, then with 200. A context manager."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.taken: list[tuple[str, bytes]] = []
        """Signature and body of each attempt."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.taken.append((self.headers["x-din-signature"], self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

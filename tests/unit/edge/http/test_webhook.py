"""A webhook is told once, with a signature, however often it fails before."""

import hashlib
import hmac
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from din_extproc.edge.http.webhook import Webhook

SECRET = "0123456789abcdef"
AT = 1_798_761_600


class Receiver:
    """A receiver that answers with these statuses in turn, then with 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.taken: list[tuple[str, bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.taken.append((self.headers["x-din-signature"], self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def webhook(receiver, pauses) -> Webhook:
    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    return Webhook(receiver.url, SECRET, lambda: AT, pause)


async def test_an_event_is_signed_and_repeated_until_it_is_taken(webhook, receiver, pauses):
    receiver.statuses = [500, 404]
    await webhook.deliver({"id": "a", "level": 80})
    assert [msgspec.json.decode(body) for _, body in receiver.taken] == [{"id": "a", "level": 80}] * 3
    assert pauses == [1.0, 5.0]
    signature, body = receiver.taken[0]
    expected = hmac.new(SECRET.encode(), f"{AT}.".encode() + body, hashlib.sha256).hexdigest()
    assert signature == f"t={AT},v1={expected}"


async def test_a_receiver_that_never_takes_it_is_given_up_with_an_error(webhook, receiver, pauses, caplog):
    receiver.statuses = [503] * 100
    with caplog.at_level(logging.ERROR):
        await webhook.deliver({"id": "a"})
    assert len(receiver.taken) == 1 + len(pauses) == 6
    assert "event a given up after 6 attempts" in caplog.text
    assert SECRET not in caplog.text

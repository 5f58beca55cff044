"""A webhook gets each event once, with a signature, however often it fails before."""

import hashlib
import hmac
import logging
from collections.abc import Iterator

import msgspec
import pytest

from din_extproc.edge.http.webhook import Webhook
from tests.support.webhook_receiver import WebhookReceiver

SECRET = "0123456789abcdef"
AT = 1_798_761_600


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as made:
        yield made


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

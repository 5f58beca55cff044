"""python-hyper's `h2` as a foreign client, in process: what it does not complain about is HTTP/2."""

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest

from din_extproc.wire.grpc import HalfClosed, Message
from din_extproc.wire.limits import WireLimits
from tests.support.frame_peer import REQUEST, connection, message

SettingCodes = h2.settings.SettingCodes


class Client:
    """An h2 client whose server echoes every message, and ends a call when the client has."""

    def __init__(self, *, limits=None, settings=None, window_updates=True):
        self.grpc = connection(limits=limits)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        if settings:
            self.h2.local_settings = h2.settings.Settings(client=True, initial_values=settings)
        self.window_updates = window_updates
        self.now = 0.0
        self.events = []
        self.bodies = {}
        self.h2.initiate_connection()
        self.exchange()

    def exchange(self):
        """Carry bytes to and fro until both are silent."""
        while True:
            up = self.h2.data_to_send()
            if up:
                self.now += 0.01
                self.grpc.receive(up, self.now)
            for event in self.grpc.take_events():
                if type(event) is Message:
                    self.grpc.send(event.call, event.data)
                elif type(event) is HalfClosed:
                    self.grpc.finish(event.call)
            down = self.grpc.take()
            if down:
                self.read(down)
            if not up and not down:
                return

    def read(self, down):
        for event in self.h2.receive_data(down):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, bytearray())
                self.bodies[event.stream_id] += event.data
                if self.window_updates and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    def call(self, *messages, pad=None, end=True, headers=REQUEST):
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, headers)
        self.upload(stream_id, b"".join(map(message, messages)), pad=pad, end=end)
        return stream_id

    def upload(self, stream_id, payload, *, pad=None, end=True):
        view = memoryview(payload)
        while view:
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size - 300, len(view))
            assert room > 0 or self.exchange() is None
            if room > 0:
                self.h2.send_data(stream_id, bytes(view[:room]), pad_length=pad)
                view = view[room:]
            self.exchange()
        if end:
            self.h2.end_stream(stream_id)
        self.exchange()

    def trailers(self, stream_id):
        return [dict(e.headers) for e in self.events if isinstance(e, h2.events.TrailersReceived) and e.stream_id == stream_id]


@pytest.mark.parametrize("pad", [None, 0, 1, 255])
@pytest.mark.parametrize("size", [0, 1, 1000, 70_000])
def test_messages_come_back_whatever_their_size_and_padding(size, pad):
    client = Client()
    stream_id = client.call(b"\x01" * size, b"second", pad=pad)
    assert client.bodies[stream_id] == message(b"\x01" * size) + message(b"second")
    assert client.trailers(stream_id) == [{"grpc-status": "0"}]
    assert client.grpc.calls == 0


def test_8_mib_cross_flow_control_both_ways():
    client = Client(limits=WireLimits(stream_window=70_000, connection_window=100_000))
    big = bytes(range(256)) * 32768
    stream_id = client.call(big)
    assert client.bodies[stream_id] == message(big)
    assert client.grpc.held == 0


@pytest.mark.parametrize("window", [1, 7, 100, 16_384])
def test_a_tiny_window_slows_a_reply_down_and_changes_nothing_else(window):
    client = Client(settings={SettingCodes.INITIAL_WINDOW_SIZE: window})
    stream_id = client.call(b"abc" * 300)
    assert client.bodies[stream_id] == message(b"abc" * 300)
    assert client.trailers(stream_id) == [{"grpc-status": "0"}]


def test_the_initial_window_may_change_in_mid_connection():
    client = Client(settings={SettingCodes.INITIAL_WINDOW_SIZE: 10}, window_updates=False)
    stream_id = client.call(b"x" * 100)
    assert len(client.bodies[stream_id]) == 10
    for window, length in ((5, 10), (50, 50), (20, 50), (200, 105)):
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        client.exchange()
        assert len(client.bodies[stream_id]) == length
    assert client.trailers(stream_id) == [{"grpc-status": "0"}]


def test_larger_frames_may_be_allowed_in_mid_connection():
    client = Client()
    client.h2.update_settings({SettingCodes.MAX_FRAME_SIZE: 60_000})
    client.exchange()
    stream_id = client.call(b"x" * 50_000)
    lengths = [len(e.data) for e in client.events if isinstance(e, h2.events.DataReceived) and e.stream_id == stream_id]
    assert lengths == [50_005]


def test_a_header_block_that_needs_continuations_arrives():
    client = Client()
    stream_id = client.call(b"x", headers=[*REQUEST, *((f"x-{n}", "v" * 1000) for n in range(25))])
    assert client.bodies[stream_id] == message(b"x")


def test_a_client_with_a_dynamic_table_is_asked_to_do_without():
    client = Client()
    for _ in range(5):
        stream_id = client.call(b"x", headers=[*REQUEST, ("x-repeated", "value")])
        assert client.bodies[stream_id] == message(b"x")
    assert client.h2.encoder.header_table_size == 0


def test_pings_priorities_and_resets_are_understood():
    client = Client()
    client.h2.ping(b"\0" * 8)
    client.h2.prioritize(1, weight=10)
    stream_id = client.call(b"x", end=False)
    client.h2.reset_stream(stream_id)
    client.exchange()
    assert any(isinstance(event, h2.events.PingAckReceived) for event in client.events)
    assert client.grpc.calls == 0
    assert client.bodies[client.call(b"after")] == message(b"after")


def test_an_answer_before_the_end_of_the_question_stops_the_upload_without_an_error():
    client = Client()
    stream_id = client.call(b"x", end=False)
    call = next(iter(client.grpc._connection.streams.values()))
    client.grpc.finish(call)
    client.exchange()
    (reset,) = [event for event in client.events if isinstance(event, h2.events.StreamReset)]
    assert (reset.stream_id, reset.error_code) == (stream_id, 0)
    assert client.trailers(stream_id) == [{"grpc-status": "0"}]

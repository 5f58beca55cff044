import hpack
import pytest

from din_extproc.wire import frames
from din_extproc.wire.frames import ErrorCode, frame, window_update
from din_extproc.wire.limits import WireLimits
from tests.support.frame_peer import HELLO, REQUEST, Peer, block, data, message, opening


def word(number):
    return frames.WORD.pack(number)


def test_the_server_speaks_first_and_announces_a_header_table_of_0():
    peer = Peer(hello=b"")
    first, second = peer.received
    settings = dict(frames.SETTING.iter_unpack(first.payload))
    assert (first.kind, second.kind) == (frames.SETTINGS, frames.WINDOW_UPDATE)
    assert settings[frames.HEADER_TABLE_SIZE] == 0
    assert settings[frames.MAX_CONCURRENT_STREAMS] == WireLimits().max_streams


def test_settings_are_acknowledged_and_a_ping_comes_back_with_its_payload():
    peer = Peer()
    assert (frames.SETTINGS, frames.ACK) in {(seen.kind, seen.flags) for seen in peer.received}
    (pong,) = peer.say(frame(frames.PING, 0, 0, b"12345678"))
    assert pong == (frames.PING, frames.ACK, 0, b"12345678")


def test_padding_and_priority_are_taken_off():
    peer = Peer()
    padded = b"\x03" + b"\x00\x00\x00\x00\x10" + block() + b"\0\0\0"
    peer.say(frame(frames.HEADERS, frames.END_HEADERS | frames.PADDED | frames.WITH_PRIORITY, 1, padded))
    peer.say(frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x02" + message(b"abc") + b"\0\0"))
    assert peer.event_names(1) == ["Opened", "Message", "HalfClosed"]
    assert peer.events[1].data == b"abc"


def test_a_header_block_may_come_in_pieces():
    peer = Peer()
    whole = block()
    peer.say(frame(frames.HEADERS, 0, 1, whole[:3]), frame(frames.CONTINUATION, 0, 1, whole[3:9]))
    assert peer.events == []
    peer.say(frame(frames.CONTINUATION, frames.END_HEADERS, 1, whole[9:]))
    assert peer.event_names(1) == ["Opened"]


def test_padding_counts_for_the_windows():
    peer = Peer(limits=WireLimits(stream_window=1000, connection_window=70_000))
    peer.say(opening(1))
    updates = []
    for _ in range(10):
        updates += peer.say(frame(frames.DATA, frames.PADDED, 1, b"\xfe" + b"\0" * 5 + b"\0" * 0xFE))
    granted = sum(int.from_bytes(seen.payload, "big") for seen in updates if seen.stream_id == 1)
    assert granted == 2600


CONNECTION_ERRORS = {
    "not http2 at all": (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR, b""),
    "ping before settings": (frames.PREFACE + frame(frames.PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR, b""),
    "headers before settings": (frames.PREFACE + opening(1), ErrorCode.PROTOCOL_ERROR, b""),
    "acknowledgement before settings": (frames.PREFACE + frame(frames.SETTINGS, frames.ACK, 0), ErrorCode.PROTOCOL_ERROR, b""),
    "oversized frame": (HELLO, ErrorCode.FRAME_SIZE_ERROR, frame(frames.DATA, 0, 1, b"\0" * 16385)),
    "data on stream 0": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.DATA, 0, 0, b"x")),
    "data on an idle stream": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.DATA, 0, 1, b"x")),
    "headers on an even stream": (HELLO, ErrorCode.PROTOCOL_ERROR, opening(2)),
    "headers on stream 0": (HELLO, ErrorCode.PROTOCOL_ERROR, opening(0)),
    "headers on an older stream": (HELLO, ErrorCode.PROTOCOL_ERROR, opening(5) + opening(3)),
    "padding longer than data": (HELLO, ErrorCode.PROTOCOL_ERROR, opening(1) + frame(frames.DATA, frames.PADDED, 1, b"\x05abcd")),
    "padding longer than headers": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.HEADERS, frames.PADDED | 4, 1, b"\xff")),
    "no padding length": (HELLO, ErrorCode.PROTOCOL_ERROR, opening(1) + frame(frames.DATA, frames.PADDED, 1)),
    "a stream that depends on itself": (
        HELLO,
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, frames.WITH_PRIORITY | 4, 1, word(1) + b"\0" + block()),
    ),
    "priority cut short": (HELLO, ErrorCode.FRAME_SIZE_ERROR, frame(frames.HEADERS, frames.WITH_PRIORITY | 4, 1, b"\0")),
    "continuation alone": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.CONTINUATION, 4, 1, b"")),
    "a block interrupted by a ping": (
        HELLO,
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 1, block()) + frame(frames.PING, 0, 0, b"12345678"),
    ),
    "a block continued elsewhere": (
        HELLO,
        ErrorCode.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 1, block()) + frame(frames.CONTINUATION, 4, 3, b""),
    ),
    "a block that is no HPACK": (HELLO, ErrorCode.COMPRESSION_ERROR, frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff")),
    "the dynamic table we refused": (HELLO, ErrorCode.COMPRESSION_ERROR, frame(frames.HEADERS, 4, 1, b"\xbe")),
    "a larger table than agreed": (HELLO, ErrorCode.COMPRESSION_ERROR, frame(frames.HEADERS, 4, 1, b"\x3f\xe1\x1f" + block())),
    "push promise": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.PUSH_PROMISE, 4, 1, word(2))),
    "settings on a stream": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.SETTINGS, 0, 1)),
    "settings of 5 bytes": (HELLO, ErrorCode.FRAME_SIZE_ERROR, frame(frames.SETTINGS, 0, 0, b"12345")),
    "acknowledgement with a payload": (HELLO, ErrorCode.FRAME_SIZE_ERROR, frame(frames.SETTINGS, 1, 0, b"123456")),
    "enable push 2": (HELLO, ErrorCode.PROTOCOL_ERROR, frames.settings({frames.ENABLE_PUSH: 2})),
    "window too large": (HELLO, ErrorCode.FLOW_CONTROL_ERROR, frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31})),
    "frames too small": (HELLO, ErrorCode.PROTOCOL_ERROR, frames.settings({frames.MAX_FRAME_SIZE: 16383})),
    "frames too large": (HELLO, ErrorCode.PROTOCOL_ERROR, frames.settings({frames.MAX_FRAME_SIZE: 2**24})),
    "ping of 7 bytes": (HELLO, ErrorCode.FRAME_SIZE_ERROR, frame(frames.PING, 0, 0, b"1234567")),
    "ping on a stream": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.PING, 0, 1, b"12345678")),
    "goaway on a stream": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.GOAWAY, 0, 1, b"12345678")),
    "goaway cut short": (HELLO, ErrorCode.FRAME_SIZE_ERROR, frame(frames.GOAWAY, 0, 0, b"1234567")),
    "reset of 3 bytes": (HELLO, ErrorCode.FRAME_SIZE_ERROR, opening(1) + frame(frames.RST_STREAM, 0, 1, b"123")),
    "reset of an idle stream": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.RST_STREAM, 0, 1, word(8))),
    "reset of stream 0": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.RST_STREAM, 0, 0, word(8))),
    "window update of 3 bytes": (HELLO, ErrorCode.FRAME_SIZE_ERROR, frame(frames.WINDOW_UPDATE, 0, 0, b"123")),
    "window update of 0": (HELLO, ErrorCode.PROTOCOL_ERROR, window_update(0, 0)),
    "window update of an idle stream": (HELLO, ErrorCode.PROTOCOL_ERROR, window_update(1, 1)),
    "window past 2 GiB": (HELLO, ErrorCode.FLOW_CONTROL_ERROR, window_update(0, 2**31 - 1)),
    "initial window past 2 GiB": (
        HELLO,
        ErrorCode.FLOW_CONTROL_ERROR,
        opening(1) + window_update(1, 2**31 - 1 - 65535) + frames.settings({frames.INITIAL_WINDOW_SIZE: 65536}),
    ),
    "priority on stream 0": (HELLO, ErrorCode.PROTOCOL_ERROR, frame(frames.PRIORITY, 0, 0, b"12345")),
    "headers after the peer's reset": (
        HELLO,
        ErrorCode.STREAM_CLOSED,
        opening(1) + frame(frames.RST_STREAM, 0, 1, word(8)) + opening(1),
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_what_breaks_the_connection_is_answered_by_goaway_and_cuts_every_call(name):
    hello, code, bad = CONNECTION_ERRORS[name]
    peer = Peer(hello=hello)
    peer.say(bad)
    assert peer.goodbye() is not None
    assert peer.goodbye().code == code
    assert peer.goodbye().reason
    assert peer.grpc.over
    assert peer.grpc.calls == 0
    opened = [event.call for event in peer.events if type(event).__name__ == "Opened"]
    assert all(peer.event_names(call.id)[-1] == "Cut" for call in opened)
    assert peer.say(opening(99)) == []


STREAM_ERRORS = {
    "data after the end": (ErrorCode.STREAM_CLOSED, opening(1, flags=5), data(1, b"x")),
    "headers after the end": (ErrorCode.STREAM_CLOSED, opening(1, flags=5), opening(1, flags=5)),
    "data after the peer's reset": (ErrorCode.STREAM_CLOSED, opening(1) + frame(frames.RST_STREAM, 0, 1, word(8)), data(1, b"x")),
    "trailers that do not end": (ErrorCode.PROTOCOL_ERROR, opening(1), frame(frames.HEADERS, 4, 1, b"")),
    "trailers with a pseudo header": (ErrorCode.PROTOCOL_ERROR, opening(1), opening(1, flags=5)),
    "window update of 0": (ErrorCode.PROTOCOL_ERROR, opening(1), window_update(1, 0)),
    "window past 2 GiB": (ErrorCode.FLOW_CONTROL_ERROR, opening(1), window_update(1, 2**31 - 1)),
    "priority of 4 bytes": (ErrorCode.FRAME_SIZE_ERROR, opening(1), frame(frames.PRIORITY, 0, 1, b"1234")),
    "more data than content-length": (ErrorCode.PROTOCOL_ERROR, opening(1, content_length="3"), data(1, b"1234")),
    "less data than content-length": (ErrorCode.PROTOCOL_ERROR, opening(1, content_length="9"), data(1, b"1234", end=True)),
    "no data though content-length": (ErrorCode.PROTOCOL_ERROR, b"", opening(1, flags=5, content_length="3")),
    "trailers before content-length": (
        ErrorCode.PROTOCOL_ERROR,
        opening(1, content_length="9") + data(1, b"1"),
        frame(frames.HEADERS, 5, 1, b""),
    ),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_what_breaks_a_stream_resets_it_and_leaves_its_neighbours_alone(name):
    code, before, bad = STREAM_ERRORS[name]
    peer = Peer()
    peer.say(before, bad)
    assert peer.resets() == [(1, code)]
    assert peer.goodbye() is None
    peer.say(opening(3), data(3, message(b"still here")))
    assert peer.event_names(3) == ["Opened", "Message"]


BAD_FIELDS = {
    "an unknown pseudo header": (*REQUEST, (":protocol", "x")),
    "a repeated pseudo header": (*REQUEST, (":path", "/")),
    "a late pseudo header": (*REQUEST[:3], ("a", "b"), (":authority", "x")),
    "no path": REQUEST[:2],
    "an empty path": (*REQUEST[:2], (":path", "")),
    "upper case": (*REQUEST, ("X-Big", "1")),
    "a space in a name": (*REQUEST, ("a b", "1")),
    "a colon in a name": (*REQUEST, ("a:b", "1")),
    "an empty name": (*REQUEST, ("", "1")),
    "connection": (*REQUEST, ("connection", "close")),
    "te that is not trailers": (*REQUEST, ("te", "gzip")),
    "a line break in a value": (*REQUEST, ("a", "b\r\nc: d")),
    "a value with white space around": (*REQUEST, ("a", " b")),
    "a content-length that is no number": (*REQUEST, ("content-length", "1x")),
    "two content-lengths": (*REQUEST, ("content-length", "1"), ("content-length", "2")),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_request_that_is_malformed_is_a_stream_error_each_time(name):
    peer = Peer()
    for stream_id in (1, 3):
        encoder = hpack.Encoder()
        encoder.header_table_size = 0
        peer.say(frame(frames.HEADERS, frames.END_HEADERS, stream_id, encoder.encode(list(BAD_FIELDS[name]))))
    assert peer.resets() == [(1, ErrorCode.PROTOCOL_ERROR), (3, ErrorCode.PROTOCOL_ERROR)]
    assert peer.events == []
    assert peer.goodbye() is None


def test_late_frames_on_a_stream_that_we_ended_are_ignored_and_still_counted():
    peer = Peer()
    peer.say(opening(1))
    peer.grpc.finish(peer.call(1))
    peer.take_frames()
    assert peer.resets() == [(1, ErrorCode.NO_ERROR)]
    answer = peer.say(
        data(1, b"late" * 4000), window_update(1, 7), frame(frames.RST_STREAM, 0, 1, word(8)), frame(frames.HEADERS, 5, 1, b"")
    )
    assert answer == []
    credit = peer.say(*(data(1, b"\0" * 16384) for _ in range(2200)))
    assert [seen.stream_id for seen in credit if seen.kind == frames.WINDOW_UPDATE] == [0]


def test_the_peer_may_use_the_dynamic_table_until_it_has_seen_our_settings():
    encoder = hpack.Encoder()
    peer = Peer(hello=frames.PREFACE + frames.settings({}))
    for stream_id in (1, 3):
        peer.say(frame(frames.HEADERS, frames.END_HEADERS, stream_id, encoder.encode([*REQUEST, ("x-own", "value")])))
    encoder.header_table_size = 0
    peer.say(frame(frames.SETTINGS, frames.ACK, 0))
    peer.say(frame(frames.HEADERS, frames.END_HEADERS, 5, encoder.encode([*REQUEST, ("x-own", "value")])))
    assert [event.call.head.path for event in peer.events] == ["/a.B/C"] * 3


def test_a_block_seen_before_is_decoded_once_and_gives_the_same_head():
    peer = Peer()
    peer.say(opening(1), opening(3))
    assert peer.call(1).head is peer.call(3).head


def test_one_stream_too_many_is_refused_and_may_be_tried_again():
    peer = Peer(limits=WireLimits(max_streams=2))
    peer.say(opening(1), opening(3), opening(5))
    assert peer.resets() == [(5, ErrorCode.REFUSED_STREAM)]
    peer.say(frame(frames.RST_STREAM, 0, 1, word(8)), opening(7))
    assert peer.event_names(7) == ["Opened"]


def test_unknown_frames_and_settings_are_ignored():
    peer = Peer()
    peer.say(frame(0x77, 0xFF, 9, b"what?"), frames.settings({0x99: 1}), frame(frames.PRIORITY, 0, 3, b"\0\0\0\x01\x10"))
    peer.say(frame(frames.GOAWAY, 0, 0, word(0) + word(0)), opening(1))
    assert peer.goodbye() is None
    assert peer.event_names(1) == ["Opened"]


FLOODS = {
    "rapid reset": (1200, lambda at: opening(2 * at + 1) + frame(frames.RST_STREAM, 0, 2 * at + 1, word(8))),
    "resets that we are made to send": (1200, lambda at: opening(2 * at + 1) + window_update(2 * at + 1, 0)),
    "settings": (40, lambda _: frames.settings({})),
    "settings acknowledgements": (40, lambda _: frame(frames.SETTINGS, frames.ACK, 0)),
    "ping": (300, lambda _: frame(frames.PING, 0, 0, b"12345678")),
    "ping acknowledgements": (300, lambda _: frame(frames.PING, frames.ACK, 0, b"12345678")),
    "empty data": (300, lambda at: (opening(1) if at == 0 else b"") + frame(frames.DATA, 0, 1)),
    "data that is only padding": (300, lambda at: (opening(1) if at == 0 else b"") + frame(frames.DATA, 8, 1, b"\x01\0")),
    "priority": (1100, lambda _: frame(frames.PRIORITY, 0, 3, b"\0\0\0\x01\x10")),
    "unknown frames": (1100, lambda _: frame(0x55, 0, 0)),
    "goaway": (1100, lambda _: frame(frames.GOAWAY, 0, 0, word(0) + word(0))),
    "window updates": (4100, lambda _: window_update(0, 1)),
    "empty continuations": (100, lambda at: frame(frames.HEADERS, 0, 1, b"") if at == 0 else frame(frames.CONTINUATION, 0, 1)),
    "long continuations": (5, lambda at: frame(frames.CONTINUATION if at else frames.HEADERS, 0, 1, b"\0" * 16000)),
    "header bomb": (1, lambda _: frame(frames.HEADERS, 4, 1, b"\x82" * 16000)),
    "refused streams": (1300, lambda at: opening(2 * at + 1)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_gets_goaway_enhance_your_calm_with_the_reason(name):
    count, make = FLOODS[name]
    peer = Peer(limits=WireLimits(max_streams=100))
    for at in range(count):
        peer.say(make(at))
    assert peer.goodbye().code == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.goodbye().reason
    assert peer.grpc.over
    assert peer.grpc.calls == 0


@pytest.mark.parametrize("name", sorted(set(FLOODS) - {"empty continuations", "long continuations", "header bomb"}))
def test_what_is_a_flood_in_one_second_is_traffic_in_an_hour(name):
    count, make = FLOODS[name]
    peer = Peer(limits=WireLimits(max_streams=100))
    for at in range(count):
        peer.now += 1.0
        peer.say(make(at))
    assert peer.goodbye() is None


def test_answered_calls_may_be_reset_as_often_as_clients_hang_up():
    peer = Peer()
    for at in range(3000):
        stream_id = 2 * at + 1
        peer.say(opening(stream_id))
        peer.grpc.send(peer.events[-1].call, b"reply")
        peer.say(frame(frames.RST_STREAM, 0, stream_id, word(8)))
    assert peer.goodbye() is None
    assert peer.grpc.calls == 0


def test_a_silent_peer_is_asked_whether_it_lives_and_dropped_when_it_does_not():
    peer = Peer(limits=WireLimits(keepalive_s=30, keepalive_timeout_s=10))
    peer.grpc.tick(29)
    assert peer.take_frames() == []
    peer.grpc.tick(31)
    (question,) = peer.take_frames()
    assert (question.kind, question.flags) == (frames.PING, 0)
    peer.now = 35
    peer.say(frame(frames.PING, frames.ACK, 0, question.payload))
    peer.grpc.tick(60)
    assert peer.take_frames() == []
    peer.grpc.tick(66)
    assert [seen.kind for seen in peer.take_frames()] == [frames.PING]
    peer.grpc.tick(77)
    peer.take_frames()
    assert peer.goodbye().reason == "keepalive timeout"
    assert peer.grpc.over


@pytest.mark.parametrize("hello", [b"", frames.PREFACE[:10], frames.PREFACE])
def test_a_peer_that_never_begins_is_cut_off(hello):
    peer = Peer(hello=hello)
    peer.grpc.tick(5)
    assert not peer.grpc.over
    peer.grpc.tick(11)
    assert peer.grpc.over


def test_a_drain_warns_first_serves_what_was_under_way_and_is_over_with_the_last_call():
    peer = Peer()
    peer.say(opening(1))
    peer.grpc.drain()
    warning, ping = peer.take_frames()
    assert (warning.kind, warning.payload[:4], warning.code) == (frames.GOAWAY, word(2**31 - 1), 0)
    peer.say(opening(3))
    assert peer.event_names(3) == ["Opened"]
    (final,) = peer.say(frame(frames.PING, frames.ACK, 0, ping.payload))
    assert (final.kind, final.payload[:4]) == (frames.GOAWAY, word(3))
    assert peer.say(opening(5), data(5, b"x"), window_update(5, 1), frame(frames.RST_STREAM, 0, 5, word(8))) == []
    peer.say(data(1, message(b"more"), end=True), data(3, b"", end=True))
    assert peer.event_names(1) == ["Opened", "Message", "HalfClosed"]
    peer.grpc.finish(peer.call(1))
    assert not peer.grpc.over
    peer.grpc.finish(peer.call(3))
    assert peer.grpc.over


def test_a_lost_transport_cuts_every_call():
    peer = Peer()
    peer.say(opening(1), opening(3))
    peer.grpc.lost()
    peer.take_frames()
    assert peer.event_names(1) == peer.event_names(3) == ["Opened", "Cut"]
    assert peer.grpc.calls == 0


@pytest.mark.parametrize(
    "begun",
    [frame(frames.PING, 0, 0, bytes(8))[:9], frame(frames.HEADERS, 0, 1, b""), frame(frames.DATA, 0, 1, bytes(100))[:50]],
    ids=["frame", "header block", "data"],
)
def test_what_has_begun_and_does_not_become_whole_costs_the_connection_however_much_it_drips(begun):
    peer = Peer(limits=WireLimits(frame_s=30, keepalive_s=1000))
    peer.say(begun)
    for at in range(1, 31):
        peer.now = at
        peer.grpc.tick(at)
        if begun[3] == frames.HEADERS and at % 10 == 0:
            peer.say(frame(frames.CONTINUATION, 0, 1, b""))
        assert peer.goodbye() is None
    peer.grpc.tick(40)
    peer.take_frames()
    assert peer.goodbye().reason == "a frame did not arrive in time"


def test_a_frame_that_is_cut_each_time_it_is_looked_at_is_not_one_that_drips():
    peer = Peer(limits=WireLimits(frame_s=30, keepalive_s=1000))
    ping = frame(frames.PING, 0, 0, bytes(8))
    peer.say(ping[:5])
    for at in range(1, 200, 5):
        peer.now = at
        peer.grpc.tick(at)
        peer.say(ping[5:] + ping[:5])
    assert peer.goodbye() is None

import pytest

from din_extproc.wire import frames
from din_extproc.wire.frames import ErrorCode, frame, window_update
from din_extproc.wire.grpc import Cut, Message
from din_extproc.wire.limits import WireLimits
from tests.support.frame_peer import HELLO, Peer, data, message, opening


def body(seen, stream_id=1):
    return b"".join(part.payload for part in seen if part.kind == frames.DATA and part.stream_id == stream_id)


def test_three_messages_and_their_replies_share_one_stream():
    peer = Peer()
    peer.say(opening(1), data(1, message(b"one") + message(b"two")))
    peer.say(data(1, message(b"three"), end=True))
    assert [event.data for event in peer.events if type(event) is Message] == [b"one", b"two", b"three"]
    call = peer.call(1)
    for reply in (b"1", b"2", b"3"):
        peer.grpc.send(call, reply)
    peer.grpc.finish(call)
    received = peer.take_frames()
    assert body(received) == message(b"1") + message(b"2") + message(b"3")
    assert peer.fields(1) == [{":status": "200", "content-type": "application/grpc"}, {"grpc-status": "0"}]
    assert received[-1].flags == frames.END_HEADERS | frames.END_STREAM
    assert peer.resets() == []
    assert peer.grpc.calls == 0


def test_a_call_that_fails_before_its_first_reply_has_trailers_only():
    peer = Peer()
    peer.say(opening(1, flags=5))
    peer.grpc.finish(peer.call(1), 12, "no 100 % näme\n")
    (only,) = peer.take_frames()
    assert only.flags == frames.END_HEADERS | frames.END_STREAM
    assert peer.headers(only) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "12",
        "grpc-message": "no 100 %25 n%C3%A4me%0A",
    }


def test_a_call_that_fails_late_has_its_status_in_the_trailers():
    peer = Peer()
    peer.say(opening(1))
    peer.grpc.send(peer.call(1), b"x")
    peer.grpc.finish(peer.call(1), 13, "late")
    peer.take_frames()
    assert peer.fields(1)[-1] == {"grpc-status": "13", "grpc-message": "late"}
    assert peer.resets() == [(1, ErrorCode.NO_ERROR)]


def test_nothing_is_sent_on_a_call_that_is_over():
    peer = Peer()
    peer.say(opening(1), opening(3))
    first, second = peer.call(1), peer.call(3)
    peer.grpc.finish(first)
    peer.say(frame(frames.RST_STREAM, 0, 3, frames.WORD.pack(8)))
    for call in (first, second):
        peer.grpc.send(call, b"late")
        peer.grpc.finish(call, 13, "late")
    assert peer.take_frames() == []


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"method": "GET"}, "405"),
        ({"content_type": "application/json"}, "415"),
        ({"content_type": "application/grpcweb"}, "415"),
        ({"content_type": ""}, "415"),
    ],
)
def test_a_request_that_is_not_grpc_gets_an_http_error(changed, status):
    peer = Peer()
    (answer, *_) = peer.say(opening(1, flags=5, **changed))
    assert peer.headers(answer) == {":status": status}
    assert peer.events == []


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
def test_every_kind_of_grpc_is_taken(content_type):
    peer = Peer()
    peer.say(opening(1, content_type=content_type))
    assert peer.event_names(1) == ["Opened"]


def test_a_compressed_message_is_unimplemented_and_ends_only_its_call():
    peer = Peer()
    peer.say(opening(1), opening(3), data(1, message(b"fine") + message(b"zip", compressed=1) + message(b"after")))
    assert peer.event_names(1) == ["Opened", "Message", "Cut"]
    assert peer.fields(1)[-1]["grpc-status"] == "12"
    peer.say(data(1, message(b"ignored")), data(3, message(b"fine")))
    assert peer.event_names(1) == ["Opened", "Message", "Cut"]
    assert peer.event_names(3) == ["Opened", "Message"]


def test_a_message_over_the_limit_is_refused_by_its_prefix():
    peer = Peer(limits=WireLimits(max_message_bytes=1000))
    peer.say(opening(1), data(1, message(b"x" * 1000)))
    assert peer.event_names(1) == ["Opened", "Message"]
    peer.say(data(1, b"\0\0\0\x03\xe9"))
    assert peer.event_names(1)[-1] == "Cut"
    assert peer.fields(1)[-1] == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "8",
        "grpc-message": "message larger than 1000 bytes",
    }


def test_unfinished_messages_of_all_calls_together_are_bounded():
    peer = Peer(limits=WireLimits(max_held_bytes=55_000))
    started = message(b"\0" * 30_000)[:20_000]
    for stream_id in (1, 3, 5):
        peer.say(opening(stream_id), data(stream_id, started))
    assert [peer.event_names(stream_id)[-1] for stream_id in (1, 3, 5)] == ["Opened", "Opened", "Cut"]
    assert peer.grpc.held == 40_000
    peer.say(data(1, message(b"\0" * 30_000)[20_000:]), frame(frames.RST_STREAM, 0, 3, frames.WORD.pack(8)))
    assert peer.event_names(1) == ["Opened", "Message"]
    assert peer.grpc.held == 0


def test_an_incomplete_last_message_fails_the_call():
    peer = Peer()
    peer.say(opening(1), data(1, message(b"whole") + b"\0\0\0", end=True))
    assert peer.event_names(1) == ["Opened", "Message", "Cut"]
    assert peer.fields(1)[-1]["grpc-status"] == "13"
    assert peer.grpc.held == 0


def test_a_message_of_8_mib_costs_its_bytes_not_their_square():
    peer = Peer()
    big = bytes(range(256)) * 32768
    peer.say(opening(1), data(1, message(b"small") + message(big) + message(b"tail"), end=True))
    assert [event.data for event in peer.events if type(event) is Message] == [b"small", big, b"tail"]
    assert peer.grpc.held == 0


def test_a_message_in_single_bytes_is_one_message():
    peer = Peer()
    peer.say(opening(1))
    for at, byte in enumerate(message(b"slow") + message(b"")):
        peer.say(data(1, bytes((byte,)), end=at == 13))
    assert [event.data for event in peer.events if type(event) is Message] == [b"slow", b""]
    assert peer.event_names(1)[-1] == "HalfClosed"


@pytest.mark.parametrize(("timeout", "seconds"), [("1H", 3600), ("2M", 120), ("3S", 3), ("40m", 0.04), ("50u", 5e-5), ("60n", 6e-8)])
def test_a_timeout_is_read_in_every_unit(timeout, seconds):
    peer = Peer(now=100)
    peer.say(opening(1, grpc_timeout=timeout))
    assert peer.grpc.next_deadline == pytest.approx(100 + seconds)


@pytest.mark.parametrize("timeout", ["", "S", "1", "1s", "-1S", "1.5S", "123456789S", "²S"])
def test_a_timeout_that_can_not_be_read_fails_the_call(timeout):
    peer = Peer()
    (answer, *_) = peer.say(opening(1, flags=5, grpc_timeout=timeout))
    assert peer.headers(answer)["grpc-status"] == "13"
    assert peer.events == []


def test_a_call_past_its_deadline_is_ended_and_the_next_deadline_known():
    peer = Peer(now=100)
    peer.say(opening(1, grpc_timeout="5S"), opening(3, grpc_timeout="1S"), opening(5))
    assert peer.grpc.next_deadline == 101
    peer.grpc.expire(101)
    peer.take_frames()
    assert peer.event_names(3) == ["Opened", "Cut"]
    assert peer.fields(3)[-1]["grpc-status"] == "4"
    assert peer.grpc.next_deadline == 105
    peer.grpc.expire(106)
    assert peer.grpc.next_deadline is None
    assert peer.grpc.calls == 1


def test_a_reply_waits_for_the_windows_and_its_trailers_behind_it():
    peer = Peer(hello=frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
    peer.say(opening(1, flags=5))
    call = peer.call(1)
    peer.grpc.send(call, b"abcdefghij")
    peer.grpc.send(call, b"k")
    peer.grpc.finish(call)
    assert body(peer.take_frames()) == message(b"abcdefghij")[:10]
    assert body(peer.say(window_update(1, 1))) == b"f"
    assert peer.say(window_update(0, 1000)) == []
    rest = peer.say(window_update(1, 1000))
    assert body(rest) == b"ghij" + message(b"k")
    assert rest[-1].flags == frames.END_HEADERS | frames.END_STREAM
    assert peer.grpc.held == 0
    assert peer.grpc.calls == 0


def test_a_window_may_shrink_below_zero_while_a_reply_waits():
    peer = Peer(hello=frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
    peer.say(opening(1))
    peer.grpc.send(peer.call(1), b"x" * 195)
    assert len(body(peer.take_frames())) == 100
    assert body(peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 20}))) == b""
    assert body(peer.say(window_update(1, 80))) == b""
    assert len(body(peer.say(window_update(1, 30)))) == 30
    assert len(body(peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 1000})))) == 70


def test_the_connections_window_is_shared_fairly():
    peer = Peer(hello=HELLO + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**24}))
    peer.say(opening(1), opening(3))
    for stream_id in (1, 3):
        peer.grpc.send(peer.call(stream_id), b"\0" * 400_000)
    peer.take_frames()
    received = peer.say(window_update(0, 200_000))
    shares = [len(body(received, stream_id)) for stream_id in (1, 3)]
    assert sum(shares) == 200_000
    assert min(shares) > 60_000


def test_frames_grow_only_as_far_as_the_peer_allows():
    peer = Peer(hello=HELLO + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**24, frames.MAX_FRAME_SIZE: 20_000}) + window_update(0, 2**24))
    peer.say(opening(1))
    peer.grpc.send(peer.call(1), b"\0" * 50_000)
    assert [len(seen.payload) for seen in peer.take_frames() if seen.kind == frames.DATA] == [20_000, 20_000, 10_005]


def test_a_full_socket_holds_data_back_but_no_control_frame():
    peer = Peer()
    peer.say(opening(1))
    peer.grpc.pause()
    peer.grpc.send(peer.call(1), b"later")
    assert [seen.kind for seen in peer.say(frame(frames.PING, 0, 0, b"12345678"))] == [frames.HEADERS, frames.PING]
    assert peer.grpc.held > 0
    peer.grpc.resume()
    assert body(peer.take_frames()) == message(b"later")


def test_a_peer_that_opens_no_window_can_not_make_memory_grow():
    limits = WireLimits(max_unsent_bytes_per_stream=100_000, max_unsent_bytes=250_000)
    peer = Peer(limits=limits, hello=frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    for stream_id in (1, 3, 5, 7):
        peer.say(opening(stream_id))
        for _ in range(20):
            peer.grpc.send(peer.call(stream_id), b"\0" * 4000)
            assert peer.grpc.held <= limits.max_unsent_bytes
    peer.take_frames()
    assert peer.resets() == [(7, ErrorCode.ENHANCE_YOUR_CALM)]
    assert peer.event_names(7) == ["Opened", "Cut"]
    tiny = Peer(limits=limits, hello=frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    tiny.say(opening(1))
    for _ in range(10_000):
        tiny.grpc.send(tiny.call(1), b"")
    tiny.take_frames()
    assert tiny.event_names(1) == ["Opened", "Cut"]
    assert tiny.grpc.held == 0


def test_a_call_whose_reply_waits_past_its_deadline_is_reset():
    peer = Peer(hello=frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.say(opening(1, flags=5, grpc_timeout="1S"))
    peer.grpc.send(peer.call(1), b"x")
    peer.grpc.finish(peer.call(1))
    peer.grpc.expire(2)
    peer.take_frames()
    assert peer.resets() == [(1, ErrorCode.CANCEL)]
    assert peer.grpc.held == peer.grpc.calls == 0


def test_a_cancelled_call_is_cut_once_and_what_waited_is_forgotten():
    peer = Peer(hello=frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.say(opening(1), data(1, b"\0\0\0\1\0part"))
    peer.grpc.send(peer.call(1), b"reply")
    peer.say(frame(frames.RST_STREAM, 0, 1, frames.WORD.pack(ErrorCode.CANCEL)))
    assert [type(event) for event in peer.events].count(Cut) == 1
    assert peer.grpc.held == peer.grpc.calls == 0


@pytest.mark.parametrize("sent", [b"", message(b"x" * 100)[:50]], ids=["nothing", "half a message"])
def test_a_call_that_says_nothing_whole_is_ended_and_one_that_has_spoken_may_be_silent(sent):
    peer = Peer(limits=WireLimits(message_s=30, keepalive_s=1000))
    peer.say(opening(1), opening(3))
    peer.say(data(3, message(b"hello")))
    peer.say(data(1, sent))
    for at in range(0, 60, 5):
        peer.grpc.tick(at)
    peer.take_frames()
    assert peer.fields(1)[-1]["grpc-status"] == "4"
    assert peer.grpc.calls == 1
    assert peer.grpc.busy


def test_a_call_that_only_waits_for_its_first_message_keeps_nobody_busy():
    peer = Peer(limits=WireLimits(keepalive_s=1000))
    peer.say(opening(1))
    peer.grpc.tick(5)
    assert not peer.grpc.busy
    peer.say(data(1, message(b"hello")))
    peer.grpc.tick(10)
    assert peer.grpc.busy


def test_a_call_whose_messages_are_cut_each_time_it_is_looked_at_goes_on():
    peer = Peer(limits=WireLimits(message_s=30, keepalive_s=1000))
    whole = message(b"x" * 100)
    peer.say(opening(1))
    peer.say(data(1, whole[:50]))
    for at in range(0, 200, 5):
        peer.grpc.tick(at)
        peer.say(data(1, whole[50:] + whole[:50]))
    assert peer.grpc.calls == 1

"""Whatever bytes a peer sends, and however the network cuts them: the same events, no exception, bounded memory."""

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import hpack
from hypothesis import given, settings
from hypothesis import strategies as st

from din_extproc.wire import frames
from din_extproc.wire.frames import frame
from din_extproc.wire.grpc import GrpcConnection, HalfClosed, Message
from din_extproc.wire.limits import WireLimits
from tests.support.frame_peer import HELLO, REQUEST, block, connection, data, message, opening, split

SMALL = WireLimits(
    max_streams=8,
    stream_window=70_000,
    connection_window=100_000,
    max_header_bytes=4096,
    max_message_bytes=20_000,
    max_held_bytes=60_000,
    max_unsent_bytes_per_stream=20_000,
    max_unsent_bytes=50_000,
)


def drive(grpc: GrpcConnection, pieces):
    """Feed the pieces to a server that echoes, and tell its events, its bytes and the most it held."""
    emitted, written, held = [], bytearray(), 0
    for at, piece in enumerate(pieces):
        grpc.receive(piece, at / 1000)
        while events := grpc.take_events():
            for event in events:
                emitted.append((type(event).__name__, event.call.id, getattr(event, "data", None)))
                if type(event) is Message:
                    grpc.send(event.call, event.data)
                elif type(event) is HalfClosed:
                    grpc.finish(event.call)
        written += grpc.take()
        held = max(held, grpc.held)
    return emitted, bytes(written), held


def conversation() -> bytes:
    """Bytes with every kind of frame that a good client sends."""
    whole = block(grpc_timeout="5S")
    return b"".join(
        (
            frames.PREFACE,
            frames.settings({frames.INITIAL_WINDOW_SIZE: 70_000, frames.MAX_FRAME_SIZE: 20_000}),
            opening(1),
            data(1, message(b"first") + message(b"x" * 300)[:100]),
            frame(frames.SETTINGS, frames.ACK, 0),
            frame(frames.HEADERS, 0, 3, whole[:7]) + frame(frames.CONTINUATION, 0, 3, b"") + frame(frames.CONTINUATION, 4, 3, whole[7:]),
            data(1, message(b"x" * 300)[100:]),
            frame(frames.DATA, frames.PADDED, 3, b"\x05" + message(b"padded") + b"\0" * 5),
            frame(frames.PING, 0, 0, b"12345678"),
            frames.window_update(0, 100_000),
            opening(5),
            frame(frames.RST_STREAM, 0, 5, frames.WORD.pack(8)),
            frame(frames.PRIORITY, 0, 7, b"\0\0\0\x01\x10"),
            frame(0xBA, 0, 0, b"unknown"),
            data(1, b"", end=True),
            frame(frames.HEADERS, 5, 3, b""),
            opening(9),
            data(9, message(b"") + message(b"y" * 2000), end=True),
        )
    )


CONVERSATION = conversation()
WHOLE = drive(connection(), [CONVERSATION])


def test_the_conversation_is_understood():
    emitted, written, _ = WHOLE
    assert [event[0] for event in emitted if event[1] == 9] == ["Opened", "Message", "Message", "HalfClosed"]
    assert [event[0] for event in emitted if event[1] == 5] == ["Opened", "Cut"]
    assert frames.GOAWAY not in {seen.kind for seen in split(written)}


def test_a_cut_at_any_place_changes_no_event_and_no_byte_of_any_stream():
    for at in range(1, len(CONVERSATION)):
        emitted, written, _ = drive(connection(), [CONVERSATION[:at], CONVERSATION[at:]])
        assert (emitted, sorted(split(written))) == (WHOLE[0], sorted(split(WHOLE[1]))), at


@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=30))
@settings(max_examples=60)
def test_cuts_at_many_places_change_nothing_either(cuts):
    places = [0, *sorted(cuts), len(CONVERSATION)]
    emitted, written, _ = drive(connection(), [CONVERSATION[a:b] for a, b in itertools.pairwise(places)])
    assert (emitted, sorted(split(written))) == (WHOLE[0], sorted(split(WHOLE[1])))


def test_byte_by_byte_changes_nothing_either():
    emitted, _, _ = drive(connection(), [CONVERSATION[at : at + 1] for at in range(len(CONVERSATION))])
    assert emitted == WHOLE[0]


stream_ids = st.sampled_from([0, 1, 1, 1, 2, 3, 3, 5, 7, 9, 2**31 - 1])
payloads = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=8).map(message),
    st.builds(lambda size: message(b"\0" * 20_000)[:size], st.integers(0, 16_000)),
    st.sampled_from([b"\0\0\0\0", b"\0\0\0\x08", b"\x7f\xff\xff\xff", b"\0\0\0\x01\x10", b"12345678"]),
    st.builds(frames.SETTING.pack, st.integers(0, 9), st.sampled_from([0, 1, 100, 16384, 65535, 2**31 - 1, 2**32 - 1])),
)
blocks = st.one_of(
    st.just(block()),
    st.binary(max_size=40),
    st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), max_size=3).map(
        lambda fields: hpack.Encoder().encode([*REQUEST, *fields])
    ),
)
flag_sets = st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 32, 37, 255])
any_frame = st.one_of(
    st.builds(frame, st.sampled_from([*range(10), 77]), flag_sets, stream_ids, payloads),
    st.builds(frame, st.just(frames.HEADERS), st.sampled_from([4, 5]), stream_ids, blocks),
    st.builds(frame, st.just(frames.DATA), st.sampled_from([0, 1]), stream_ids, payloads),
    st.builds(opening, st.sampled_from([1, 3, 5, 7, 9, 11])),
)


def bounded(grpc, held):
    room = SMALL.max_held_bytes + SMALL.max_unsent_bytes + 20_000
    return held <= room and grpc._connection._framer.held <= 9 + 16_384 + SMALL.max_header_bytes and grpc.calls <= SMALL.max_streams


@given(st.lists(any_frame, max_size=40))
@settings(max_examples=200)
def test_no_frames_raise_and_what_they_leave_behind_is_bounded(parts):
    grpc = connection(limits=SMALL)
    emitted, written, held = drive(grpc, [HELLO, *parts])
    assert bounded(grpc, held)
    assert split(written)
    kinds = {}
    for name, stream_id, _ in emitted:
        kinds.setdefault(stream_id, []).append(name)
    for names in kinds.values():
        assert names[0] == "Opened"
        assert names.count("Opened") == 1
        assert names.count("Cut") <= 1
        assert "Cut" not in names[:-1]
    grpc.lost()
    assert (grpc.held, grpc.calls) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, len(CONVERSATION) - 1), st.integers(0, 255)), min_size=1, max_size=8), st.integers(1, 500))
@settings(max_examples=150)
def test_mutated_bytes_raise_nothing_and_leave_nothing_unbounded(changes, step):
    mutated = bytearray(CONVERSATION)
    for at, byte in changes:
        mutated[at] = byte
    grpc = connection(limits=SMALL)
    _, _, held = drive(grpc, [bytes(mutated[at : at + step]) for at in range(0, len(mutated), step)])
    assert bounded(grpc, held)
    grpc.lost()
    assert (grpc.held, grpc.calls) == (0, 0)


if importlib.util.find_spec("atheris"):  # it has no build for every Python

    def test_a_coverage_guided_fuzzer_finds_nothing_in_a_short_run():
        command = [sys.executable, Path(__file__).parents[1] / "support" / "fuzz_http2.py", "-runs=3000", "-max_len=600", "-verbosity=0"]
        done = subprocess.run(command, capture_output=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]

"""Coverage-guided fuzzing of the wire: `python tests/support/fuzz_http2.py [-runs=N] [CORPUS]` (libFuzzer's options).

Rule: no byte string makes a connection raise or hold more than its limits.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))
with atheris.instrument_imports(include=["din_extproc.wire"]):
    from din_extproc.wire import frames
    from din_extproc.wire.grpc import GrpcCall, GrpcConnection, HalfClosed, Message, read_head
    from din_extproc.wire.header_block import Memo
    from din_extproc.wire.limits import WireLimits

HELLO = frames.PREFACE + frames.settings({}) + frames.frame(frames.SETTINGS, frames.ACK, 0)
LIMITS = WireLimits(max_message_bytes=1000, max_held_bytes=3000, max_unsent_bytes_per_stream=2000, max_unsent_bytes=5000, max_streams=5)


def one_input(data: bytes) -> None:
    """Run one input. The first byte decides how the rest is cut; an even half skips the preface."""
    if not data:
        return
    step = data[0] // 2 + 1
    grpc = GrpcConnection(Memo(read_head), LIMITS, 0.0, GrpcCall)
    if data[0] % 2:
        grpc.receive(HELLO, 0.0)
    for at in range(1, len(data), step):
        grpc.receive(data[at : at + step], at / 100)
        for event in grpc.take_events():
            if type(event) is Message:
                grpc.send(event.call, event.data)
            elif type(event) is HalfClosed:
                grpc.finish(event.call)
        grpc.take()
        if grpc.held > LIMITS.max_held_bytes + LIMITS.max_unsent_bytes + LIMITS.max_message_bytes:
            raise AssertionError(f"{grpc.held} bytes are held")
    grpc.lost()
    if grpc.held or grpc.calls:
        raise AssertionError("something outlives the connection")


atheris.Setup(sys.argv, one_input)
atheris.Fuzz()

"""A registry call that its client ends."""

from din_extproc._proto.din.v1 import registry_pb2 as pb
from din_extproc.edge.grpc.registry_service import _RegistryCall


class Call:
    authorization = ""
    names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, _status, reason: str) -> None:
        self.failed.append(reason)


def test_a_call_that_ends_without_a_message_is_answered_and_any_other_is_not_answered_twice():
    for cancelled, asks, reasons in ((False, False, ["no DrainRequest was sent"]), (True, False, []), (False, True, [])):
        call = Call()

        async def handle(*_):
            return pb.DrainResponse()

        handler = _RegistryCall(call, pb.DrainRequest, handle, lambda task: task.close())
        if asks:
            handler.message(pb.DrainRequest(node_id="n").SerializeToString())
        handler.ended(cancelled=cancelled)
        assert call.failed == reasons

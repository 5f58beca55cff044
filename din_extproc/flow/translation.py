"""Translates a node's successful answer, if the node's interface is not the client's.

Rule: whatever an engine answers, the client gets an answer of the API that it called or the gateway's error body, never other words.
"""

from http import HTTPStatus

from msgspec import Struct

from din_extproc.domain.request import Operation, RequestHead
from din_extproc.domain.response import BufferedTranslation, Replacement, ResponseHead, StreamTranslation, Treatment
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode
from din_extproc.flow import answers
from din_extproc.southbound.dialect import AnswerContext, Dialect
from din_extproc.southbound.events import DONE, error_event, messages_failure

_STREAM: Headers = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_JSON: Headers = (("content-type", "application/json"),)
_CANNOT_READ = "The node sent something that can't be read."
_BROKEN = error_event(_CANNOT_READ) + DONE
_BROKEN_MESSAGE = messages_failure(_CANNOT_READ)
_UNREADABLE = Refusal(RefusalCode.UPSTREAM_ERROR, "The node's answer could not be read.")


class Translation(Struct, frozen=True):
    """The translation of the response to one request to the client's API."""

    dialect: Dialect
    context: AnswerContext
    stream: bool
    head: RequestHead
    """The request's, for what an error names."""
    trace_id: str

    def choose_treatment(self, head: ResponseHead) -> Treatment:
        """Return the treatment of a successful answer that begins so."""
        if self.stream:
            broken = _BROKEN_MESSAGE if self.context.operation is Operation.MESSAGES else _BROKEN
            return StreamTranslation(self.dialect.create_translator(self.context), _STREAM, broken)
        return BufferedTranslation(lambda body: self._translate_whole(head, body))

    def _translate_whole(self, head: ResponseHead, body: bytes) -> Replacement:
        made = self.dialect.translate_answer(self.context, head, body)
        return build_unreadable_response(self.head, self.trace_id) if made is None else Replacement(HTTPStatus.OK, _JSON, made)


def build_unreadable_response(request: RequestHead, trace_id: str) -> Replacement:
    """Return the client's error for an answer that can't be translated."""
    error = answers.build_refusal_response(_UNREADABLE, request, trace_id)
    return Replacement(error.status, error.headers, error.body)

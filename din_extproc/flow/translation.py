"""What is done with a node's good answer: nothing, unless its engine was spoken to in its own words.

Rule: whatever an engine answers, the client gets OpenAI's answer or the gateway's error body, never the engine's own words.
"""

from http import HTTPStatus

from msgspec import Struct

from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import BufferedTranslation, Replacement, ResponseHead, StreamTranslation, Treatment
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode
from din_extproc.flow import answers
from din_extproc.southbound.dialect import AnswerContext, Dialect
from din_extproc.southbound.events import DONE, error_event

_STREAM: Headers = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_JSON: Headers = (("content-type", "application/json"),)
_BROKEN = error_event("The node sent something that can't be read.") + DONE
_UNREADABLE = Refusal(RefusalCode.UPSTREAM_ERROR, "The node's answer could not be read.")


class Translation(Struct, frozen=True):
    """How the answer to one request becomes OpenAI's."""

    dialect: Dialect
    asked: AnswerContext
    stream: bool
    head: RequestHead
    """The request's, for what an error names."""
    trace_id: str

    def treat(self, head: ResponseHead) -> Treatment:
        """What is done with a good answer that begins so."""
        if self.stream:
            return StreamTranslation(self.dialect.create_translator(self.asked), _STREAM, _BROKEN)
        return BufferedTranslation(lambda body: self._whole(head, body))

    def _whole(self, head: ResponseHead, body: bytes) -> Replacement:
        made = self.dialect.translate_answer(self.asked, head, body)
        return unreadable_response(self.head, self.trace_id) if made is None else Replacement(HTTPStatus.OK, _JSON, made)


def unreadable_response(request: RequestHead, trace_id: str) -> Replacement:
    """What the client gets instead of an answer that is none."""
    error = answers.refusal_response(_UNREADABLE, request, trace_id)
    return Replacement(error.status, error.headers, error.body)

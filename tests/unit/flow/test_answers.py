import msgspec
import pytest

from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.answers import internal_error, refusal

HEAD = RequestHead("POST", "/v1/chat/completions?api_key=SECRET", {})


def test_a_refusal_is_openais_error_and_a_problem_document_at_once_and_shows_no_query():
    answer = refusal(Refusal(RefusalCode.MODEL_NOT_FOUND, "No such model.", param="model"), HEAD, "trace-0001")
    body = msgspec.json.decode(answer.body)
    assert body["error"] == {"message": "No such model.", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert (body["status"], body["trace_id"], body["instance"]) == (answer.status, "trace-0001", "/v1/chat/completions")
    assert ("x-din-trace-id", "trace-0001") in answer.headers


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (Refusal(RefusalCode.VERSION_MISMATCH, ""), True),  # a 409, which OpenAI's clients try again
        (Refusal(RefusalCode.REQUEST_EXCEEDS_LIMIT, ""), True),
        (Refusal(RefusalCode.RATE_LIMIT_EXCEEDED, "", retry_after_ms=1500), False),
        (Refusal(RefusalCode.NO_HEALTHY_NODE, ""), False),
    ],
)
def test_a_client_is_told_when_another_try_is_no_use(refused, told):
    assert (("x-should-retry", "false") in refusal(refused, HEAD, "t").headers) == told


def test_a_fault_may_be_tried_again():
    answer = internal_error(HEAD, "t")
    assert answer.status == 500
    assert "x-should-retry" not in dict(answer.headers)

import msgspec
import pytest

from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.answers import build_internal_error, build_refusal_response

HEAD = RequestHead("POST", "/v1/chat/completions?api_key=SECRET", {})


def test_a_refusal_is_openais_error_and_a_problem_document_at_once_and_shows_no_query():
    answer = build_refusal_response(Refusal(RefusalCode.MODEL_NOT_FOUND, "No such model.", param="model"), HEAD, "trace-0001")
    body = msgspec.json.decode(answer.body)
    assert body["error"] == {"message": "No such model.", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert (body["status"], body["trace_id"], body["instance"]) == (answer.status, "trace-0001", "/v1/chat/completions")
    assert ("x-din-trace-id", "trace-0001") in answer.headers


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (Refusal(RefusalCode.VERSION_MISMATCH, ""), True),  # a 409, which OpenAI's clients try again
        (Refusal(RefusalCode.REQUEST_EXCEEDS_LIMIT, ""), True),
        (Refusal(RefusalCode.RATE_LIMIT_EXCEEDED, "", retry_after_ms=1500), False),
        (Refusal(RefusalCode.NO_HEALTHY_NODE, ""), False),
    ],
)
def test_a_client_gets_x_should_retry_when_another_try_is_no_use(refused, expected):
    assert (("x-should-retry", "false") in build_refusal_response(refused, HEAD, "t").headers) == expected


def test_a_fault_may_be_tried_again():
    answer = build_internal_error(HEAD, "t")
    assert answer.status == 500
    assert "x-should-retry" not in dict(answer.headers)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (RefusalCode.INVALID_API_KEY, "authentication_error"),
        (RefusalCode.MODEL_NOT_ALLOWED, "permission_error"),
        (RefusalCode.MODEL_NOT_FOUND, "not_found_error"),
        (RefusalCode.REQUEST_TOO_LARGE, "request_too_large"),
        (RefusalCode.RATE_LIMIT_EXCEEDED, "rate_limit_error"),
        (RefusalCode.QUEUE_FULL, "rate_limit_error"),
        (RefusalCode.VERSION_MISMATCH, "invalid_request_error"),
        (RefusalCode.INTERNAL_ERROR, "api_error"),
        (RefusalCode.NO_HEALTHY_NODE, "overloaded_error"),
        (RefusalCode.UPSTREAM_TIMEOUT, "api_error"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/", "/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"])
def test_a_refusal_on_anthropic_s_path_has_anthropic_s_shape_and_headers(path: str, code: RefusalCode, kind: str) -> None:
    answer = build_refusal_response(Refusal(code, "No."), RequestHead("POST", path, {"accept": "application/problem+json"}), "trace-0001")
    assert (answer.status, msgspec.json.decode(answer.body)) == (
        code.status,
        {"type": "error", "error": {"type": kind, "message": "No."}, "request_id": "trace-0001"},
    )
    headers = dict(answer.headers)
    assert (headers["request-id"], headers["x-request-id"], headers["content-type"]) == ("trace-0001", "trace-0001", "application/json")


def test_other_paths_keep_the_one_error_body() -> None:
    for path in ("/v1/messagesx", "/v1/chat/completions", "/v1/models"):
        answer = build_refusal_response(Refusal(RefusalCode.MODEL_NOT_FOUND, "No."), RequestHead("POST", path, {}), "t")
        assert msgspec.json.decode(answer.body)["code"] == "model_not_found"
        assert "request-id" not in dict(answer.headers)
        assert ("x-request-id", "t") in answer.headers


def test_a_prompt_that_is_too_long_is_worded_as_agents_know_it() -> None:
    message = "The longest context in service is 8192 tokens; prompt and requested output need 9001."
    answer = build_refusal_response(Refusal(RefusalCode.CONTEXT_LENGTH_EXCEEDED, message), RequestHead("POST", "/v1/messages", {}), "t")
    assert msgspec.json.decode(answer.body)["error"]["message"] == "prompt is too long: 9001 tokens > 8192 maximum"

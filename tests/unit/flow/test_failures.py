"""What is done with a node's answer by its head, and what an error's body becomes."""

import gzip
import json
import zlib

import pytest

from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import PASS, BufferedTranslation, Replacement, ResponseHead
from din_extproc.flow.failures import translate_error
from din_extproc.southbound.error_body import READ_BYTES

ENGINE_ERROR = b'{"error":{"message":"no such field","param":"body.top_k"}}'


def treated(status, accept="", path="/v1/chat/completions", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = RequestHead("POST", f"{path}?api_key=secret", {"accept": accept})
    return translate_error("vllm", ResponseHead(status, named), request, "trace", 1000.0)


@pytest.mark.parametrize("status", [200, 204, 299])
def test_what_is_no_error_is_not_looked_at(status):
    assert treated(status) is PASS


@pytest.mark.parametrize("status", [101, 302, 399])
def test_what_sends_a_client_elsewhere_is_an_error_whatever_it_says(status):
    given = treated(status, content_type="application/json", location="http://elsewhere")
    assert isinstance(given, Replacement)
    assert given.status == 502
    assert "elsewhere" not in dict(given.headers).values()


def test_an_error_waits_for_its_body_and_is_rewritten():
    waits = treated(422, content_length=str(len(ENGINE_ERROR)))
    assert isinstance(waits, BufferedTranslation)
    replaced = waits.rewrite(ENGINE_ERROR)
    assert isinstance(replaced, Replacement)
    body = json.loads(replaced.body)
    assert (replaced.status, body["status"], body["code"], body["detail"]) == (400, 400, "invalid_request", "no such field")
    assert (body["error"]["param"], body["instance"], body["trace_id"]) == ("top_k", "/v1/chat/completions", "trace")
    assert replaced.headers == (("content-type", "application/json"), ("x-din-trace-id", "trace"), ("x-request-id", "trace"))


def test_a_body_that_says_how_long_it_is_and_is_too_long_is_not_waited_for():
    replaced = treated(500, content_length=str(READ_BYTES + 1))
    assert isinstance(replaced, Replacement)
    assert json.loads(replaced.body)["code"] == "upstream_error"


@pytest.mark.parametrize(("content_type", "read"), [("text/html", False), ("", False), ("application/problem+json", True)])
def test_a_body_that_does_not_say_how_long_it_is_is_waited_for_only_when_it_is_json(content_type, read):
    assert isinstance(treated(500, content_type=content_type), BufferedTranslation if read else Replacement)


def test_times_are_reported_in_both_headers_and_problem_json_by_its_name():
    replaced = treated(429, accept="application/problem+json", retry_after="Thu, 01 Jan 1970 00:16:47 GMT")
    assert dict(replaced.headers) == {
        "content-type": "application/problem+json",
        "x-din-trace-id": "trace",
        "x-request-id": "trace",
        "retry-after": "7",
        "retry-after-ms": "7000",
    }


@pytest.mark.parametrize(
    ("encoding", "body", "detail"),
    [
        ("gzip", gzip.compress(ENGINE_ERROR, mtime=0), "no such field"),
        (" GZIP ", gzip.compress(ENGINE_ERROR, mtime=0), "no such field"),
        ("deflate", zlib.compress(ENGINE_ERROR), "no such field"),
        ("identity", ENGINE_ERROR, "no such field"),
        ("br", ENGINE_ERROR, "The request is malformed"),
        ("gzip", ENGINE_ERROR, "The request is malformed"),
        ("gzip", gzip.compress(ENGINE_ERROR + b" " * 50_000_000), "The request is malformed"),
    ],
)
def test_a_compressed_error_is_read_within_bounds(encoding, body, detail):
    assert json.loads(treated(400, content_encoding=encoding, content_length=str(len(body))).rewrite(body).body)["detail"] == detail


def test_an_error_body_of_ours_stays_as_it_is():
    assert treated(409, content_length="50").rewrite(b'{"type":"urn:din-extproc:error:version_mismatch"}') is None


@pytest.mark.parametrize(
    ("status", "engine_error", "expected_status", "kind", "message"),
    [
        (400, {"error": {"message": "no such field"}}, 400, "invalid_request_error", "no such field"),
        (
            400,
            {"error": {"message": "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8990 + 10)."}},
            400,
            "invalid_request_error",
            "prompt is too long: 9000 tokens > 8192 maximum",
        ),
        (
            400,
            {"error": {"message": "The input (9000 tokens) is longer than the model's context length (8192 tokens)."}},
            400,
            "invalid_request_error",
            "prompt is too long: 9000 tokens > 8192 maximum",
        ),
        (
            500,
            {"error": "input length exceeds context length"},
            400,
            "invalid_request_error",
            "prompt is too long: input length exceeds context length",
        ),
        (503, {"error": "busy"}, 503, "overloaded_error", "The node answered with an error (503)."),
        (500, {"error": "no"}, 502, "api_error", "The node answered with an error (500)."),
        (429, {"error": "slow"}, 429, "rate_limit_error", "The nodes of this model are busy; the limit is theirs, not the tenant's."),
        (
            409,
            {"type": "urn:din-extproc:error:version_mismatch", "code": "version_mismatch", "error": {"message": "other version"}},
            409,
            "invalid_request_error",
            "other version",
        ),
    ],
)
def test_a_node_s_error_on_anthropic_s_path_has_anthropic_s_format(status, engine_error, expected_status, kind, message):
    body = json.dumps(engine_error).encode()
    replaced = treated(status, path="/v1/messages", content_length=str(len(body))).rewrite(body)
    assert (replaced.status, json.loads(replaced.body)) == (
        expected_status,
        {"type": "error", "error": {"type": kind, "message": message}, "request_id": "trace"},
    )
    assert dict(replaced.headers)["request-id"] == "trace"


def test_envoy_s_own_answer_on_anthropic_s_path_passes():
    assert treated(503, path="/v1/messages", content_type="application/json", x_din_trace_id="trace") is PASS

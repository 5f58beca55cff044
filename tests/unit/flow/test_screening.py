"""A tenant's policy for sensitive data: passed on, masked or refused, and how it is recorded."""

import gzip
import json

import msgspec
import pytest
import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import RequestHead
from din_extproc.domain.usage import Labels, Sensitive
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from tests.support.stack import key_of, node, tenant

SECRETS = ("alice@example.com", "4111 1111 1111 1111", "EMP-123456")
PROMPT = f"write to {SECRETS[0]}, card {SECRETS[1]}, staff {SECRETS[2]}"
MASKED = "write to [EMAIL], card [BANK_CARD], staff [STAFF]"


@pytest.fixture
def planes(tmp_path):
    """Makes a plane for one tenant's policy."""

    def make(policy) -> RequestPlane:
        config = {
            "version": 1,
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000", max_seq_len=200_000)]}},
            "tenants": [tenant("acme") | ({} if policy is None else {"sensitive_data": policy}), tenant("other")],
            "sensitive_data": {"patterns": {"staff": "EMP-[0-9]{6}"}},
        }
        file = tmp_path / "din.yaml"
        file.write_text(yaml.safe_dump(config))
        return RequestPlane(load(file, {}), LocalLedger(lambda: 0), Background(), DecisionCounters())

    return make


async def decide(plane, body, path="/v1/chat/completions", who="acme"):
    head = RequestHead("POST", path, {"authorization": f"Bearer {key_of(who)}"})
    return await plane.context.create_handler().decide(head, body if isinstance(body, bytes) else json.dumps(body).encode())


def chat(text=PROMPT) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def labels(verdict) -> Labels:
    return msgspec.json.decode(verdict.metadata["labels"], type=Labels)


KINDS = {"email": 1, "bank_card": 1, "staff": 1}


@pytest.mark.parametrize("policy", [None, "off", False])
async def test_without_a_policy_nobody_looks(planes, policy):
    verdict = await decide(planes(policy), chat())
    assert isinstance(verdict, Send)
    assert verdict.body is None
    assert labels(verdict).sensitive is None


async def test_flagged_a_request_passes_unchanged_and_accounting_gets_kinds_and_counts(planes):
    verdict = await decide(planes("flag"), chat())
    assert verdict.body is None
    assert labels(verdict).sensitive == Sensitive("flag", KINDS)


async def test_masked_it_passes_without_the_data(planes):
    plane = planes("mask")
    verdict = await decide(plane, chat())
    assert json.loads(verdict.body) == chat(MASKED)
    assert labels(verdict).sensitive == Sensitive("mask", KINDS)
    clean = await decide(plane, chat("hello"))
    assert clean.body is None
    assert labels(clean).sensitive is None


async def test_blocked_it_is_refused_and_nothing_that_was_found_is_repeated(planes):
    verdict = await decide(planes("block"), chat())
    assert isinstance(verdict, ImmediateResponse)
    body = json.loads(verdict.body)
    assert (verdict.status, body["code"]) == (400, "sensitive_data_blocked")
    assert "bank_card, email, staff" in body["detail"]
    assert msgspec.json.decode(verdict.metadata["sensitive"], type=Sensitive) == Sensitive("block", KINDS)
    output = repr((verdict.body, verdict.metadata, verdict.headers))
    assert [secret for secret in SECRETS if secret in output] == []
    assert dict(verdict.headers)["x-should-retry"] == "false"


async def test_a_policy_is_its_tenant_s_own_and_may_name_the_kinds(planes):
    plane = planes({"policy": "mask", "kinds": ["email"]})
    verdict = await decide(plane, chat())
    assert json.loads(verdict.body) == chat(PROMPT.replace(SECRETS[0], "[EMAIL]"))
    assert (await decide(plane, chat(), who="other")).body is None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "to a@b.co"}),
        ("/v1/completions", {"prompt": ["x", "to a@b.co"], "suffix": "a@b.co"}),
        ("/v1/embeddings", {"input": ["to a@b.co", "x"]}),
        ("/v1/rerank", {"query": "a@b.co", "documents": ["x", "a@b.co"]}),
        (
            "/v1/responses",
            {"instructions": "a@b.co", "input": [{"role": "user", "content": [{"type": "input_text", "text": "to a@b.co"}]}]},
        ),
        ("/v1/messages", {"system": "a@b.co", "messages": [{"role": "user", "content": [{"type": "text", "text": "to a@b.co"}]}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "a@b.co"},
                    {"role": "user", "content": [{"type": "text", "text": "to a@b.co"}]},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\na@b.co"}'}}]},
                    {"role": "tool", "tool_call_id": "t", "content": "a@b.co"},
                ]
            },
        ),
    ],
)
async def test_every_part_of_a_prompt_is_looked_at(planes, path, fields):
    body = {"model": "m", "user": "u@b.co", **fields}
    verdict = await decide(planes("mask"), body, path)
    masked = {name: json.loads(json.dumps(value).replace("a@b.co", "[EMAIL]")) for name, value in fields.items()}
    assert json.loads(verdict.body) == {**body, **masked}


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "assistant", "content": "x", field: "to a@b.co"}, *MESSAGES]}
        for field in ("reasoning_content", "reasoning", "refusal", "name", "what_comes_next")
    ]
    + [
        {"messages": MESSAGES, field: value}
        for field, value in {
            "documents": [{"title": "t", "text": "a@b.co"}],
            "chat_template": "a@b.co",
            "chat_template_kwargs": {"custom": ["a@b.co"]},
            "guided_json": {"description": "a@b.co"},
            "structured_outputs": {"json": {"properties": {"a@b.co": {"type": "string"}}}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"description": "a@b.co"}}},
            "tools": [{"type": "function", "function": {"name": "f", "description": "a@b.co"}}],
            "stop": ["x", "a@b.co"],
            "metadata": {"owner": "a@b.co"},
            "what_comes_next": {"id": "a@b.co", "type": "a@b.co"},
        }.items()
    ],
)
async def test_no_field_that_holds_text_is_overlooked(planes, fields):
    body = {"model": "m", **fields}
    masked = json.loads((await decide(planes("mask"), body)).body)
    if "guided_json" in fields:
        body["structured_outputs"] = {"json": body.pop("guided_json")}
    assert masked == json.loads(json.dumps(body).replace("a@b.co", "[EMAIL]"))
    assert json.loads((await decide(planes("block"), body)).body)["code"] == "sensitive_data_blocked"


NO_MEDIA = ("data:image/png;base64,AA a@b.co", 'x\\";base64,"a@b.co', "https://x.org/ a@b.co", 'https://x.org/\\", a@b.co', '"id":"a@b.co"')


@pytest.mark.parametrize("text", NO_MEDIA)
@pytest.mark.parametrize("field", ["content", "data", "image_url", "id", "type"])
async def test_nothing_passes_for_media_or_an_id_that_is_none(planes, field, text):
    body = {"model": "m", "messages": [{"role": "user", "content": "x", field: text}]}
    assert json.loads((await decide(planes("block"), body)).body)["code"] == "sensitive_data_blocked"


async def test_ids_and_media_are_not_looked_at(planes):
    signed = "https://bucket.example/cat.png?id=AKIAIOSFODNN7EXAMPLE&x=a@b.co"
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,sk-abcdefghijklmnopqrstuvwxyz"}},
        {"type": "image_url", "image_url": {"detail": "low", "url": signed}},
        {"type": "input_image", "image_url": signed},
        {"type": "image", "source": {"type": "url", "url": signed}},
        {"type": "input_audio", "input_audio": {"data": "+13800138000+" + "A" * 256, "format": "wav"}},
    ]
    body = {
        "model": "m",
        "user": "a@b.co",
        "messages": [
            {"role": "user", "content": parts},
            {"role": "tool", "tool_call_id": "13800138000", "content": "x"},
        ],
    }
    assert (await decide(planes("block"), body)).body is None


async def test_a_prompt_that_can_not_be_scanned_is_not_sent_masked_and_is_flagged_as_such(planes):
    many = chat("a@b.co " * 5000)
    verdict = await decide(planes("mask"), many)
    assert json.loads(verdict.body)["code"] == "sensitive_data_blocked"
    flagged = labels(await decide(planes("flag"), many)).sensitive
    assert not flagged.whole


async def test_a_compressed_body_is_masked_and_sent_on_plain(planes):
    head = RequestHead("POST", "/v1/chat/completions", {"authorization": f"Bearer {key_of('acme')}", "content-encoding": "gzip"})
    verdict = await planes("mask").context.create_handler().decide(head, gzip.compress(json.dumps(chat()).encode()))
    assert json.loads(verdict.body) == chat(MASKED)
    assert "content-encoding" in verdict.remove_headers


async def test_half_a_surrogate_pair_beside_a_finding_survives(planes):
    body = rb'{"model":"m","messages":[{"role":"user","content":"\ud83d a@b.co"}]}'
    assert (await decide(planes("mask"), body)).body == body.replace(b"a@b.co", b"[EMAIL]")


async def test_the_tokens_are_those_of_what_is_sent_on(planes):
    long = chat("-----BEGIN PRIVATE KEY-----" + "A" * 4000 + "-----END PRIVATE KEY-----")
    masked, flagged = [labels(await decide(planes(policy), long)) for policy in ("mask", "flag")]
    assert masked.prompt_estimate < flagged.prompt_estimate / 10

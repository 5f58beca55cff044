"""What each operation is charged, from the request to the record: by answers that were captured, or that the interfaces document."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import Struct

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import BUILT_IN, OPERATIONS, BodyKind, Operation, RequestHead
from din_extproc.domain.usage import Usage
from din_extproc.domain.verdict import Send
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.observe.accesslog import read_fluentd_records
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from din_extproc.tools.verify.sample_body import build_body, content_type
from tests.support.lua_filter import JSON, SSE, UsageFilter, capture
from tests.support.stack import key_of, node, tenant

VLLM = Path(__file__).parents[1] / "captures" / "vllm"
SOUND = {":status": "200", "content-type": "audio/mpeg"}
TEXT = {":status": "200", "content-type": "text/plain; charset=utf-8"}
TOKENS = {"type": "tokens", "input_tokens": 14, "input_token_details": {"audio_tokens": 14}, "output_tokens": 5, "total_tokens": 19}
TRANSCRIPTION_EVENTS = [
    {"type": "transcript.text.delta", "delta": "so what"},
    {"type": "transcript.text.done", "text": "so what", "usage": TOKENS},
]
SPOKEN = [
    {"type": "speech.audio.delta", "audio": "AAAA"},
    {"type": "speech.audio.done", "usage": {"input_tokens": 14, "output_tokens": 101}},
]
SIX = {"prompt_tokens": 6, "total_tokens": 6}
POOLED = {"id": "pool-1", "object": "list", "data": [{"index": 0, "object": "pooling", "data": [0.1, 0.2]}]}
CLASSES = {"id": "classify-1", "object": "list", "data": [{"index": 0, "label": "Default", "probs": [0.3, 0.7], "num_classes": 2}]}
IMAGE = {"created": 1, "data": [{"b64_json": "iVBORw0K" * 1000}]}
DRAWN = {"total_tokens": 1066, "input_tokens": 10, "output_tokens": 1056, "input_tokens_details": {"text_tokens": 10, "image_tokens": 0}}
DRAWING = [
    {"type": "image_generation.partial_image", "b64_json": "A" * 900},
    {"type": "image_generation.completed", "b64_json": "A" * 900, "usage": DRAWN},
]
COMPACTED = {"id": "resp_1", "object": "response.compaction", "output": [{"type": "compaction", "encrypted_content": "x" * 900}]}


class Answered(Struct, frozen=True):
    """An answer and what it costs. Usage None: the prompt's estimate alone."""

    operation: Operation
    answer: object
    """The name of a capture, a JSON body, events of a stream, or bytes."""
    usage: Usage | None
    headers: dict[str, str] | None = None
    """None: those of JSON, or of the capture."""
    stream: bool = False
    more: dict[str, Any] = {}
    """Further fields of the request."""


CASES = [
    Answered(Operation.CHAT, "chat-nonstream", Usage(36, 12)),
    Answered(Operation.COMPLETIONS, "completions-nonstream", Usage(5, 5)),
    Answered(Operation.RESPONSES, "responses", Usage(31, 4)),
    Answered(Operation.COMPACT, {**COMPACTED, "usage": {"input_tokens": 40, "output_tokens": 20, "total_tokens": 60}}, Usage(40, 20)),
    Answered(Operation.MESSAGES, "messages-anthropic", Usage(36, 4)),
    Answered(Operation.EMBEDDINGS, "embeddings", Usage(11, 0)),
    Answered(Operation.RERANK, "rerank", Usage(17, 0)),
    Answered(Operation.SCORE, "score", Usage(17, 0)),
    Answered(Operation.POOLING, {**POOLED, "usage": SIX}, Usage(6, 0)),
    Answered(Operation.CLASSIFY, {**CLASSES, "usage": SIX}, Usage(6, 0)),
    Answered(Operation.TOKENIZE, "tokenize", Usage(0, 0)),
    Answered(Operation.DETOKENIZE, {"prompt": "word word"}, Usage(0, 0)),
    Answered(Operation.COUNT_TOKENS, {"input_tokens": 36}, Usage(0, 0)),
    Answered(Operation.INPUT_TOKENS, {"object": "response.input_tokens", "input_tokens": 11}, Usage(0, 0)),
    Answered(Operation.TRANSCRIPTIONS, {"text": "so what", "usage": {"type": "duration", "seconds": 9}}, Usage(90, 0, audio_seconds=9)),
    Answered(Operation.TRANSCRIPTIONS, {"text": "so what", "usage": TOKENS}, Usage(14, 5, audio_seconds=1)),
    Answered(Operation.TRANSCRIPTIONS, {"task": "transcribe", "duration": 8.47, "text": "so what"}, Usage(90, 0, audio_seconds=9)),
    Answered(Operation.TRANSCRIPTIONS, b"so what\n", None, TEXT),
    Answered(Operation.TRANSCRIPTIONS, TRANSCRIPTION_EVENTS, Usage(14, 5, audio_seconds=1), SSE, stream=True),
    Answered(Operation.TRANSLATIONS, {"text": "so what", "usage": {"type": "duration", "seconds": 2}}, Usage(20, 0, audio_seconds=2)),
    Answered(Operation.SPEECH, b"\xff\xfb" * 4000, None, SOUND),
    Answered(Operation.SPEECH, SPOKEN, Usage(14, 101), SSE, stream=True),
    Answered(Operation.IMAGES, {**IMAGE, "usage": DRAWN}, Usage(10, 1056, images=1)),
    Answered(Operation.IMAGES, IMAGE, None, more={"n": 3}),
    Answered(Operation.IMAGES, DRAWING, Usage(10, 1056, images=1), SSE, stream=True),
]


@pytest.fixture(scope="module")
def usage_filter() -> UsageFilter:
    return UsageFilter()


@pytest.fixture
async def plane(tmp_path) -> RequestPlane:
    pools = {
        "near": {"model": "near", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000")]},
        "far": {"model": "far", "engine": "openai", "nodes": [{"id": "b", "url": "https://api.example/v1", "max_seq_len": 100_000}]},
    }
    file = tmp_path / "din.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "pools": pools, "tenants": [tenant("acme")]}))
    return RequestPlane(load(file, {}), LocalLedger(lambda: 0), Background(), DecisionCounters())


def written(answer: object) -> tuple[dict[str, str], bytes]:
    """Return headers (none: those of the case) and body of an answer."""
    if isinstance(answer, str):
        return capture(VLLM / f"{answer}.txt")
    if isinstance(answer, list):
        events = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in answer)
        return {}, "".join(events).encode()
    return {}, answer if isinstance(answer, bytes) else json.dumps(answer).encode()


@pytest.mark.parametrize("case", CASES, ids=[f"{case.operation} {number}" for number, case in enumerate(CASES)])
async def test_an_answer_costs_what_it_reports_or_what_is_estimated(plane, usage_filter, case):
    far = {Operation.COMPACT, Operation.INPUT_TOKENS, Operation.SPEECH, Operation.IMAGES}
    body = build_body(case.operation, "far" if case.operation in far else "near", 3, stream=case.stream)
    if case.operation.spec.body is BodyKind.JSON:
        body = json.dumps({**json.loads(body), **dict.fromkeys(case.operation.spec.limits, 64), **case.more}).encode()
    headers = {"authorization": f"Bearer {key_of('acme')}", "content-type": content_type(case.operation)}
    handler = plane.context.create_handler()
    verdict = await handler.decide(RequestHead("POST", case.operation.value, headers), body)
    assert isinstance(verdict, Send), verdict
    handler.ended(cut=False)
    captured, answer = written(case.answer)
    played = usage_filter.play([answer], headers=captured or case.headers or JSON, metadata=dict(verdict.metadata))
    assert (played.out, played.log) == (answer, "")
    found = {"m": {**verdict.metadata, **played.facts}, "z": None, "s": 200, "f": "-", "u": "10.0.0.1:8000", "t": "1700000000.000000"}
    found |= {
        "d": 5000,
        "l": 5,
        "r": 100,
        "w": 200,
        "a": 3000,
        "e": 4000,
        "n": 1,
        "b": len(answer),
        "c": "",
        "g": None,
        "v": None,
        "y": None,
    }
    [record] = read_fluentd_records("din", [(0, found)], {"10.0.0.1:8000": "a"})
    estimate = record.prompt_estimate
    asked = {Operation.TRANSCRIPTIONS: {"audio_seconds": 1}, Operation.IMAGES: {"images": 3}}.get(case.operation, {})
    assert record.usage == (case.usage or Usage(estimate, 0, estimated=True, **asked))
    assert record.outcome == "completed"


def test_every_operation_has_an_answer():
    assert {case.operation for case in CASES} == set(OPERATIONS) == set(BUILT_IN.values()) - {Operation.MODELS}

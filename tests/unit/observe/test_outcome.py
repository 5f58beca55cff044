"""The two tables: how an exchange ended, and what it costs."""

from typing import Any

import pytest
from msgspec.structs import replace

from din_extproc.domain.usage import Outcome, Usage
from din_extproc.observe.outcome import ExchangeEnding, classify_outcome, compute_usage

STREAM = ExchangeEnding(
    status=200,
    flags=frozenset(),
    reached=True,
    answered=True,
    refusal="",
    error="",
    finish_reason="stop",
    done=True,
    deltas=12,
    delta_bytes=50,
    body_bytes=4000,
    prompt_tokens=None,
    completion_tokens=None,
    cached_tokens=0,
    prompt_estimate=40,
)
CUT: dict[str, Any] = {"done": False, "finish_reason": ""}
NOTHING: dict[str, Any] = {**CUT, "deltas": None, "delta_bytes": 0, "body_bytes": 0}
BODY: dict[str, Any] = {"deltas": None, "delta_bytes": 0, "finish_reason": ""}
FREE = Usage(0, 0)


AUDIO: dict[str, Any] = {**BODY, "generates": False, "prompt_estimate": 40, "audio_estimate": 4, "body_bytes": 60}
IMAGES: dict[str, Any] = {**BODY, "generates": False, "prompt_estimate": 9, "images": 3}


@pytest.mark.parametrize(
    ("changes", "usage"),
    [
        ({**AUDIO, "audio_seconds": 5}, Usage(50, 0, audio_seconds=5)),
        (AUDIO, Usage(40, 0, audio_seconds=4, estimated=True)),
        ({**AUDIO, "prompt_tokens": 14, "completion_tokens": 12}, Usage(14, 12, audio_seconds=4)),
        ({**AUDIO, "audio_seconds": 5000}, Usage(40, 0, audio_seconds=4, estimated=True, disputed=True)),
        ({**AUDIO, "audio_seconds": 5, "deltas": 6, "delta_bytes": 20}, Usage(50, 6, audio_seconds=5)),
        ({**AUDIO, "audio_seconds": 5, "status": 503}, FREE),
        (IMAGES, Usage(9, 0, images=3, estimated=True)),
        ({**IMAGES, "prompt_tokens": 10, "completion_tokens": 4160, "body_bytes": 10**6}, Usage(10, 4160, images=3)),
        ({**IMAGES, "status": 400}, FREE),
    ],
)
def test_images_and_audio_are_charged_beside_tokens(changes, usage):
    ending = replace(STREAM, **changes)
    assert compute_usage(ending, classify_outcome(ending)) == usage


def guess(prompt: int, completion: int) -> Usage:
    return Usage(prompt, completion, estimated=True)


def disputed(prompt: int, completion: int) -> Usage:
    return Usage(prompt, completion, estimated=True, disputed=True)


@pytest.mark.parametrize(
    ("changes", "ended_as", "cost"),
    [
        ({}, Outcome.COMPLETED, guess(40, 12)),
        ({"prompt_tokens": 38, "completion_tokens": 13, "cached_tokens": 38}, Outcome.COMPLETED, Usage(38, 13, 38)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, Outcome.COMPLETED, guess(40, 12)),
        ({"completion_tokens": 13}, Outcome.COMPLETED, guess(40, 13)),
        ({"refusal": "queue_full", "status": 429, "reached": False, "answered": False, **NOTHING}, Outcome.REFUSED, FREE),
        ({"flags": frozenset({"UH"}), "status": 503, "reached": False, "answered": False, **NOTHING}, Outcome.NOT_DISPATCHED, FREE),
        ({"flags": frozenset({"NC"}), "status": 503, "reached": False, "answered": False, **BODY}, Outcome.NOT_DISPATCHED, FREE),
        ({"status": 0, "flags": frozenset({"DC"}), "reached": False, "answered": False, **NOTHING}, Outcome.CLIENT_CANCELLED, FREE),
        ({"status": 200, "reached": False, "answered": False, **BODY}, Outcome.COMPLETED, FREE),
        ({"flags": frozenset({"SI"}), "status": 408, "reached": False, "answered": False, **NOTHING}, Outcome.NOT_DISPATCHED, FREE),
        ({"flags": frozenset({"DC"}), **CUT, "deltas": 5, "delta_bytes": 20}, Outcome.CLIENT_CANCELLED, guess(40, 5)),
        ({"flags": frozenset({"DC"}), "status": 0, "answered": False, **NOTHING}, Outcome.CLIENT_CANCELLED, guess(40, 0)),
        ({"flags": frozenset({"DC"})}, Outcome.COMPLETED, guess(40, 12)),
        ({"flags": frozenset({"DR"}), "finish_reason": ""}, Outcome.COMPLETED, guess(40, 12)),
        ({"status": 429, **BODY}, Outcome.UPSTREAM_BUSY, FREE),
        ({"status": 503, **BODY}, Outcome.UPSTREAM_ERROR, FREE),
        ({"status": 503, "error": "InternalServerError", **BODY}, Outcome.UPSTREAM_ERROR, FREE),
        ({"status": 400, "error": "exceed_context_size_error", **BODY}, Outcome.CLIENT_ERROR, FREE),
        ({"flags": frozenset({"UF", "URX"}), "status": 503, "answered": False, **BODY}, Outcome.UPSTREAM_ERROR, FREE),
        ({"flags": frozenset({"UR"}), "status": 503, "answered": False, **BODY}, Outcome.UPSTREAM_ERROR, FREE),
        ({"flags": frozenset({"UT"}), "status": 504, "answered": False, **BODY}, Outcome.UPSTREAM_TIMEOUT, guess(40, 0)),
        ({"flags": frozenset({"SI"}), **CUT}, Outcome.UPSTREAM_TIMEOUT, guess(40, 12)),
        ({"error": "server_error", "deltas": 0, "delta_bytes": 0, "finish_reason": ""}, Outcome.UPSTREAM_ERROR, FREE),
        ({"error": "server_error", "deltas": 20, "finish_reason": ""}, Outcome.UPSTREAM_ERROR, guess(40, 20)),
        ({"error": "server_error", "flags": frozenset({"DC"}), **CUT}, Outcome.UPSTREAM_ERROR, guess(40, 12)),
        ({"flags": frozenset({"UPE"}), **CUT, "deltas": 40, "delta_bytes": 40}, Outcome.UPSTREAM_TRUNCATED, guess(40, 40)),
        ({**CUT, "deltas": 40, "delta_bytes": 40}, Outcome.UPSTREAM_TRUNCATED, guess(40, 40)),
        ({"finish_reason": "abort"}, Outcome.UPSTREAM_TRUNCATED, guess(40, 12)),
        ({"prompt_tokens": 38, "completion_tokens": 1, **CUT, "flags": frozenset({"DC"})}, Outcome.CLIENT_CANCELLED, guess(38, 12)),
        ({"prompt_tokens": 38, "completion_tokens": 20, **CUT, "flags": frozenset({"DC"})}, Outcome.CLIENT_CANCELLED, Usage(38, 20)),
        ({**BODY, "body_bytes": 750}, Outcome.COMPLETED, guess(40, 100)),
        ({**BODY, "body_bytes": 100_350, "context": 16_384}, Outcome.COMPLETED, guess(40, 25_000)),
        ({**BODY, "body_bytes": 10**9, "context": 8192}, Outcome.COMPLETED, guess(40, 16_384)),
        ({**BODY, "body_bytes": 100}, Outcome.COMPLETED, guess(40, 0)),
        ({**BODY, "body_bytes": 9000, "generates": False}, Outcome.COMPLETED, guess(40, 0)),
        ({**CUT, "unread": True}, Outcome.COMPLETED, guess(40, 12)),
        ({**CUT, "unread": True, "flags": frozenset({"UR"})}, Outcome.UPSTREAM_TRUNCATED, guess(40, 12)),
        ({**CUT, "unread": True, "flags": frozenset({"DC"})}, Outcome.CLIENT_CANCELLED, guess(40, 12)),
        ({"delta_bytes": 600}, Outcome.COMPLETED, guess(40, 100)),
        ({"delta_bytes": 12 * 7 + 64}, Outcome.COMPLETED, guess(40, 12)),
    ],
)
def test_an_exchange_ends_and_costs_as_the_tables_say(changes: dict[str, Any], ended_as: Outcome, cost: Usage) -> None:
    ending = replace(STREAM, **changes)
    assert classify_outcome(ending) is ended_as
    assert compute_usage(ending, ended_as) == cost


RESERVED = 296


def test_an_aborted_stream_is_never_free_and_never_the_whole_reservation() -> None:
    for deltas in range(1, 100):
        left = replace(STREAM, flags=frozenset({"DC"}), deltas=deltas, delta_bytes=4 * deltas, done=False, finish_reason="")
        cost = compute_usage(left, classify_outcome(left))
        assert (cost.total_tokens, cost.estimated) == (40 + deltas, True)
        assert 0 < cost.total_tokens < RESERVED


def test_cached_tokens_are_a_part_and_not_an_addition() -> None:
    changed = replace(STREAM, prompt_tokens=3604, completion_tokens=878, cached_tokens=3604, prompt_estimate=3000, delta_bytes=4000)
    cost = compute_usage(changed, classify_outcome(changed))
    assert (cost.total_tokens, cost.cached_tokens) == (4482, 3604)


ASKED: dict[str, Any] = {"context": 8192, "prompt_tokens": 40}


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({**ASKED, "completion_tokens": 10, "output_asked": 10}, Usage(40, 10)),
        ({**ASKED, "completion_tokens": 11, "output_asked": 10}, disputed(40, 10)),
        ({**ASKED, "completion_tokens": 12, "output_asked": 4096}, Usage(40, 12)),
        ({**ASKED, "completion_tokens": 50 + 64, "output_asked": 4096}, Usage(40, 114)),
        ({**ASKED, "completion_tokens": 50 + 65, "output_asked": 4096}, disputed(40, 12)),
        ({**ASKED, "completion_tokens": 4096}, disputed(40, 12)),
        ({**ASKED, "completion_tokens": 4065, "unread": True}, disputed(40, 12)),
        ({**ASKED, "completion_tokens": 4000, "unread": True}, Usage(40, 4000)),
        ({**ASKED, **BODY, "body_bytes": 1000, "completion_tokens": 120}, Usage(40, 120)),
        ({**ASKED, **BODY, "body_bytes": 1000, "completion_tokens": 1065}, disputed(40, 162)),
        ({**ASKED, **BODY, "body_bytes": 40 << 20, "completion_tokens": 262_144, "output_asked": 10}, disputed(40, 10)),
        ({**BODY, "body_bytes": 40 << 20, "output_asked": 10}, guess(40, 10)),
        ({**ASKED, **BODY, "body_bytes": 10**6, "completion_tokens": 16_385}, disputed(40, 16_384)),
        ({**ASKED, "completion_tokens": 16_384, "delta_bytes": 50_000}, Usage(40, 16_384)),
        ({**ASKED, "completion_tokens": 16_385, "delta_bytes": 50_000}, disputed(40, 8334)),
        ({**ASKED, "completion_tokens": 40_000, "delta_bytes": 50_000, "one_prompt": False}, Usage(40, 40_000)),
        ({**ASKED, "completion_tokens": 10**11, "one_prompt": False}, disputed(40, 12)),
        ({**ASKED, "prompt_tokens": 4 * 40 + 1024}, Usage(1184, 0)),
        ({**ASKED, "prompt_tokens": 4 * 40 + 1025}, disputed(40, 12)),
        ({"prompt_tokens": 120_000, "completion_tokens": 12, "prompt_estimate": 12}, disputed(12, 12)),
        ({**ASKED, "prompt_tokens": 100_000, "prompt_estimate": 30_000}, Usage(100_000, 0)),
        ({**ASKED, "prompt_tokens": 16_384, "media": True}, Usage(16_384, 0)),
        ({**ASKED, "prompt_tokens": 16_385, "media": True}, disputed(40, 12)),
        ({"bad_usage": True}, disputed(40, 12)),
        ({"bad_usage": True, "prompt_tokens": 40, "completion_tokens": 1}, disputed(40, 12)),
    ],
)
def test_an_engine_charges_no_more_than_was_asked_and_passed_and_the_estimate_allows(changes: dict[str, Any], cost: Usage) -> None:
    assert compute_usage(replace(STREAM, **changes), Outcome.COMPLETED) == cost


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({**BODY, "body_bytes": 900, "generates": False, "total_tokens": 60}, Usage(60, 0)),
        ({"total_tokens": 60}, guess(48, 12)),
        ({"total_tokens": 8}, guess(0, 8)),
        ({"total_tokens": 60, "prompt_tokens": 40, "completion_tokens": 15}, Usage(40, 15)),
        ({"total_tokens": 10**6}, disputed(40, 12)),
    ],
)
def test_a_total_alone_is_the_prompt_where_nothing_is_generated_and_shared_out_elsewhere(changes: dict[str, Any], cost: Usage) -> None:
    assert compute_usage(replace(STREAM, **changes), Outcome.COMPLETED) == cost


def test_a_stream_whose_choices_have_not_all_finished_is_truncated() -> None:
    ending = replace(STREAM, done=False, open_choices=1)
    assert classify_outcome(ending) is Outcome.UPSTREAM_TRUNCATED
    assert classify_outcome(replace(ending, open_choices=0)) is Outcome.COMPLETED
    assert classify_outcome(replace(ending, flags=frozenset({"DC"}))) is Outcome.CLIENT_CANCELLED


ZEROS: dict[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({**BODY, "body_bytes": 9000, "generates": False, **ZEROS}, FREE),
        ({**BODY, "body_bytes": 9000, "generates": False}, guess(40, 0)),
        ({**BODY, "body_bytes": 200, **ZEROS}, guess(40, 0)),
        ({**ZEROS}, guess(40, 12)),
        ({**CUT, "flags": frozenset({"DC"}), **ZEROS}, guess(40, 12)),
        ({"prompt_tokens": 38, "completion_tokens": 0, "deltas": 0}, Usage(38, 0)),
    ],
)
def test_nothing_is_a_usage_where_nothing_is_generated(changes, cost):
    assert compute_usage(replace(STREAM, **changes), Outcome.COMPLETED) == cost


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({"done": False}, Usage(38, 1)),
        ({"done": False, "flags": frozenset({"DC"})}, guess(38, 12)),
        ({"done": False, "flags": frozenset({"UR"})}, guess(38, 12)),
        ({"done": False, "flags": frozenset({"SI"})}, guess(38, 12)),
        ({"flags": frozenset({"DC"})}, Usage(38, 1)),
        ({**BODY, "done": False, "flags": frozenset({"DC"})}, Usage(38, 1)),
    ],
)
def test_a_finish_reason_does_not_make_a_cut_answer_free(changes, cost):
    """Of several choices one is finished first."""
    ending = replace(STREAM, prompt_tokens=38, completion_tokens=1, **changes)
    assert compute_usage(ending, classify_outcome(ending)) == cost

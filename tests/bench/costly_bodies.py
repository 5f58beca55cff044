"""CPU per byte of parsing the costliest known bodies, compared with an ordinary chat of the same size."""

import json
import time

from din_extproc.domain.request import RequestHead
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.read import parse_request
from tests.bench.field import Field, Figures
from tests.support.costly_bodies import LISTS, SHAPES, SIZE, messages

_CHAT = "/v1/chat/completions"
_CALIBRATOR = TokenCalibrator()


def costly_bodies(field: Field) -> Figures:
    """How many times an ordinary chat's the dearest body's CPU time is, each the best of some rounds."""
    rounds = field.effort.rounds
    ordinary = _spent(
        messages(json.dumps({"role": "user", "content": "The quick brown fox, and a lazy dog. " * 20}).encode()), _CHAT, 2 * rounds
    )
    shapes = [(make, _CHAT) for make in SHAPES.values()] + [
        (make, path) for make in LISTS.values() for path in ("/v1/embeddings", "/v1/completions")
    ]
    return {"dearest_body_vs_chat": max(_spent(make(), path, rounds) for make, path in shapes) / ordinary}


def _spent(body: bytes, path: str, rounds: int) -> float:
    """Seconds of CPU for each byte."""
    return min(_once(body, path) for _ in range(rounds)) / len(body)


def _once(body: bytes, path: str) -> float:
    began = time.process_time()
    parse_request(RequestHead("POST", path, {}), body, lambda _model: _CALIBRATOR, 3 * SIZE)
    return time.process_time() - began

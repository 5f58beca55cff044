"""Maps the error messages of the engines to error codes: one table per engine.

A pattern is anchored at the message's start, or names an error type of the engine, so that a prompt quoted in a message can't imitate
another error. Only exhausted memory is searched for anywhere, and only in server errors.

Patterns follow the engines' sources or captured answers. The first match wins.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from din_extproc.domain.verdict import RefusalCode
from din_extproc.southbound.error_body import ParsedError

_TRITON_PREFIX = (
    r"(?:in ensemble '[^']*', )?(?:Executor failed process requestId \d+ due to the following error: )?"
    r"(?:Encountered an error (?:in|when) [\w ]+: )?(?:\[TensorRT-LLM\]\[ERROR\] )?(?:Assertion failed: )?"
)


class Wording(Struct, frozen=True):
    """One pattern of an error."""

    code: RefusalCode
    pattern: re.Pattern[str] | None = None
    """Pattern for the start of the message."""
    name: str = ""
    """The error's type or code."""

    def matches(self, error: ParsedError) -> bool:
        """Return whether the error matches."""
        if self.name and self.name in (error.type, error.code):
            return True
        return self.pattern is not None and self.pattern.match(error.message) is not None


def _patterns(code: RefusalCode, *patterns: str) -> tuple[Wording, ...]:
    return tuple(Wording(code, re.compile(pattern, re.IGNORECASE)) for pattern in patterns)


_TOO_LONG = RefusalCode.CONTEXT_LENGTH_EXCEEDED
_TENSORRT = (
    r"Prompt length \(\d+\) exceeds maximum input length \(\d+\)",
    r"The sum of prompt length \([\d.]+\)[^.]*should not exceed max_num_tokens \(\d+\)",
    r"default_max_tokens \(-?\d+\) (?:must|should) be greater than 0",
)

WORDINGS: dict[str, tuple[Wording, ...]] = {
    "vllm": _patterns(
        _TOO_LONG,
        r"This model's maximum context length is \d+ tokens",
        r"max_tokens=\d+ cannot be greater than max_model_len=\d+",
        r"'?max_tokens'? or '?max_completion_tokens'? is too large: \d+",
        r"The (?:decoder |encoder )?prompt \((?:total )?length \d+\) is (?:longer than the maximum model length|too long to fit)",
        r"Input prompt \(\d+ tokens\) is too long and exceeds limit of \d+",
        r"Prompt length of \d+ is longer than the maximum model length",
    ),
    "sglang": (
        *_patterns(
            _TOO_LONG,
            r"The input \(\d+ tokens\) is longer than the model's context length",
            r"Requested token count exceeds the model's maximum context length of \d+ tokens",
            r"Input length \(\d+(?: tokens)?\) exceeds (?:the )?(?:model's )?maximum (?:allowed|context) length",
        ),
        *_patterns(RefusalCode.UPSTREAM_BUSY, r"The request queue is full"),
    ),
    "tgi": (
        *_patterns(
            _TOO_LONG,
            r"Input validation error: `inputs` tokens \+ `max_new_tokens` must be <= \d+",
            r"Input validation error: `inputs` must have less than \d+ tokens",
        ),
        Wording(RefusalCode.UPSTREAM_BUSY, name="overloaded"),
        Wording(RefusalCode.UPSTREAM_ERROR, name="generation"),
        Wording(RefusalCode.UPSTREAM_ERROR, name="incomplete_generation"),
    ),
    "ollama": (
        *_patterns(
            _TOO_LONG,
            r"(?:the )?input length exceeds (?:the |maximum )?context length",
            r"prompt too long; exceeded max context length by \d+ tokens",
        ),
        *_patterns(RefusalCode.UPSTREAM_BUSY, r"server busy, please try again"),
        *_patterns(RefusalCode.INVALID_REQUEST, r'option "[^"]{1,200}" must be of type '),  # with status 500
        *_patterns(RefusalCode.MODEL_NOT_FOUND, r"model '[^']{1,200}' not found", r'model "[^"]{1,200}" not found'),
        *_patterns(RefusalCode.PATH_NOT_FOUND, r'"[^"]{1,200}" does not support (?:chat|generate|embeddings|completion)'),
    ),
    "llamacpp": (
        Wording(_TOO_LONG, name="exceed_context_size_error"),
        *_patterns(
            _TOO_LONG,
            r"(?:the )?request (?:\(\d+ tokens\) )?exceeds the available context size",
            r"input (?:\(\d+ tokens\) )?is (?:too large to process|larger than the max context size)",
        ),
        Wording(RefusalCode.PATH_NOT_FOUND, name="not_supported_error"),
        *_patterns(RefusalCode.PATH_NOT_FOUND, r"the current context does not support logits computation"),
    ),
    "tensorrt_llm": _patterns(_TOO_LONG, *_TENSORRT),
    "triton": (
        *_patterns(_TOO_LONG, *(_TRITON_PREFIX + words for words in _TENSORRT)),
        *_patterns(RefusalCode.MODEL_NOT_FOUND, r"Request for unknown model: "),
        *_patterns(RefusalCode.UPSTREAM_BUSY, r"Exceeds maximum queue size"),
    ),
    "anthropic": (
        *_patterns(_TOO_LONG, r"prompt is too long: \d+ tokens > \d+ maximum", r"input length and `max_tokens` exceed context limit: \d+"),
        *_patterns(RefusalCode.MODEL_NOT_FOUND, r"model: "),
        Wording(RefusalCode.UPSTREAM_BUSY, name="overloaded_error"),
    ),
    "a gateway in between": (
        Wording(_TOO_LONG, name="context_length_exceeded"),
        *_patterns(_TOO_LONG, r"(?:litellm\.)?ContextWindowExceededError\b", r"Context Window exceeded"),
        Wording(RefusalCode.MODEL_NOT_FOUND, name="model_not_found"),
    ),
}
_MODEL_MISSING = re.compile(r"The model `[^`]{1,200}` does not exist")
_NO_MEMORY = re.compile(
    r"\bout of memory\b|OutOfMemoryError|requires more system memory|not enough memory to handle \d|failed to allocate [\w ]*buffer",
    re.IGNORECASE,
)


def match_wording(engine: str, error: ParsedError) -> RefusalCode | None:
    """Return the code of a known message, or None.

    The engine's own patterns come first, then all others: the node may run another engine.
    """
    for wording in _wordings_for(engine):
        if wording.matches(error):
            return wording.code
    return RefusalCode.MODEL_NOT_FOUND if _MODEL_MISSING.match(error.message) else None


def is_out_of_memory(error: ParsedError) -> bool:
    """Return whether the node ran out of memory, by any engine's message."""
    return _NO_MEMORY.search(error.message) is not None


def _wordings_for(engine: str) -> Iterator[Wording]:
    yield from WORDINGS.get(engine, ())
    for other, wordings in WORDINGS.items():
        if other != engine:
            yield from wordings

"""How each engine words the errors that mean the same behind all of them: one table per engine.

Rule: a wording is anchored at the sentence's beginning, or is a type of the engine's own, so that a prompt that an engine quotes in its
message can't pass for an error of another kind. Only memory that ran out is looked for anywhere, and only in faults of the node.

Word for word from the engines' sources or captures. The order decides where two fit.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from din_extproc.domain.verdict import RefusalCode
from din_extproc.southbound.error_body import ParsedError

_TRITON_BEFORE = (
    r"(?:in ensemble '[^']*', )?(?:Executor failed process requestId \d+ due to the following error: )?"
    r"(?:Encountered an error (?:in|when) [\w ]+: )?(?:\[TensorRT-LLM\]\[ERROR\] )?(?:Assertion failed: )?"
)


class Wording(Struct, frozen=True):
    """One way to say it."""

    code: RefusalCode
    begins: re.Pattern[str] | None = None
    """How the message begins."""
    name: str = ""
    """The error's own type or code."""

    def fits(self, said: ParsedError) -> bool:
        """Whether this was said."""
        if self.name and self.name in (said.type, said.code):
            return True
        return self.begins is not None and self.begins.match(said.message) is not None


def _words(code: RefusalCode, *beginnings: str) -> tuple[Wording, ...]:
    return tuple(Wording(code, re.compile(beginning, re.IGNORECASE)) for beginning in beginnings)


_TOO_LONG = RefusalCode.CONTEXT_LENGTH_EXCEEDED
_TENSORRT = (
    r"Prompt length \(\d+\) exceeds maximum input length \(\d+\)",
    r"The sum of prompt length \([\d.]+\)[^.]*should not exceed max_num_tokens \(\d+\)",
    r"default_max_tokens \(-?\d+\) (?:must|should) be greater than 0",
)

WORDINGS: dict[str, tuple[Wording, ...]] = {
    "vllm": _words(
        _TOO_LONG,
        r"This model's maximum context length is \d+ tokens",
        r"max_tokens=\d+ cannot be greater than max_model_len=\d+",
        r"'?max_tokens'? or '?max_completion_tokens'? is too large: \d+",
        r"The (?:decoder |encoder )?prompt \((?:total )?length \d+\) is (?:longer than the maximum model length|too long to fit)",
        r"Input prompt \(\d+ tokens\) is too long and exceeds limit of \d+",
        r"Prompt length of \d+ is longer than the maximum model length",
    ),
    "sglang": (
        *_words(
            _TOO_LONG,
            r"The input \(\d+ tokens\) is longer than the model's context length",
            r"Requested token count exceeds the model's maximum context length of \d+ tokens",
            r"Input length \(\d+(?: tokens)?\) exceeds (?:the )?(?:model's )?maximum (?:allowed|context) length",
        ),
        *_words(RefusalCode.UPSTREAM_BUSY, r"The request queue is full"),
    ),
    "tgi": (
        *_words(
            _TOO_LONG,
            r"Input validation error: `inputs` tokens \+ `max_new_tokens` must be <= \d+",
            r"Input validation error: `inputs` must have less than \d+ tokens",
        ),
        Wording(RefusalCode.UPSTREAM_BUSY, name="overloaded"),
        Wording(RefusalCode.UPSTREAM_ERROR, name="generation"),
        Wording(RefusalCode.UPSTREAM_ERROR, name="incomplete_generation"),
    ),
    "ollama": (
        *_words(
            _TOO_LONG,
            r"(?:the )?input length exceeds (?:the |maximum )?context length",
            r"prompt too long; exceeded max context length by \d+ tokens",
        ),
        *_words(RefusalCode.UPSTREAM_BUSY, r"server busy, please try again"),
        *_words(RefusalCode.INVALID_REQUEST, r'option "[^"]{1,200}" must be of type '),  # with status 500
        *_words(RefusalCode.MODEL_NOT_FOUND, r"model '[^']{1,200}' not found", r'model "[^"]{1,200}" not found'),
        *_words(RefusalCode.PATH_NOT_FOUND, r'"[^"]{1,200}" does not support (?:chat|generate|embeddings|completion)'),
    ),
    "llamacpp": (
        Wording(_TOO_LONG, name="exceed_context_size_error"),
        *_words(
            _TOO_LONG,
            r"(?:the )?request (?:\(\d+ tokens\) )?exceeds the available context size",
            r"input (?:\(\d+ tokens\) )?is (?:too large to process|larger than the max context size)",
        ),
        Wording(RefusalCode.PATH_NOT_FOUND, name="not_supported_error"),
        *_words(RefusalCode.PATH_NOT_FOUND, r"the current context does not support logits computation"),
    ),
    "tensorrt_llm": _words(_TOO_LONG, *_TENSORRT),
    "triton": (
        *_words(_TOO_LONG, *(_TRITON_BEFORE + words for words in _TENSORRT)),
        *_words(RefusalCode.MODEL_NOT_FOUND, r"Request for unknown model: "),
        *_words(RefusalCode.UPSTREAM_BUSY, r"Exceeds maximum queue size"),
    ),
    "a gateway in between": (
        Wording(_TOO_LONG, name="context_length_exceeded"),
        *_words(_TOO_LONG, r"(?:litellm\.)?ContextWindowExceededError\b", r"Context Window exceeded"),
        Wording(RefusalCode.MODEL_NOT_FOUND, name="model_not_found"),
    ),
}
_MODEL_MISSING = re.compile(r"The model `[^`]{1,200}` does not exist")
_NO_MEMORY = re.compile(
    r"\bout of memory\b|OutOfMemoryError|requires more system memory|not enough memory to handle \d|failed to allocate [\w ]*buffer",
    re.IGNORECASE,
)


def worded(engine: str, said: ParsedError) -> RefusalCode | None:
    """What the words mean; None: they are nobody's known ones. The engine's own come first: another may stand behind its name."""
    for wording in _own_first(engine):
        if wording.fits(said):
            return wording.code
    return RefusalCode.MODEL_NOT_FOUND if _MODEL_MISSING.match(said.message) else None


def no_memory(said: ParsedError) -> bool:
    """Whether the node had too little memory, in anybody's words."""
    return _NO_MEMORY.search(said.message) is not None


def _own_first(engine: str) -> Iterator[Wording]:
    yield from WORDINGS.get(engine, ())
    for other, wordings in WORDINGS.items():
        if other != engine:
            yield from wordings

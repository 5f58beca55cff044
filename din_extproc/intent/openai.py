"""Extracts the model's input from a request body, per operation.

Tolerant: any JSON yields a prompt; validating it is the engine's task.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from din_extproc.domain.request import Operation
from din_extproc.intent.outline import Outline, has_more_values

_T = TypeVar("_T")
_ABSENT = Raw(b"null")
_NON_LIST_BYTES = bytes(byte for byte in range(256) if byte not in b"[],")
_BYTES_PER_TOKEN = 4
"""Weight of a token id against text bytes when the longest input is determined."""
_MAX_NESTING = 4
"""The largest depth of parts inside parts that is read: a tool's result holds parts of its own."""
_MAX_ELEMENTS = 4096
"""The largest list whose elements are read one by one. A longer one counts by its bytes, so that the cost is bounded by the body's size."""
_MAX_TOTAL_ELEMENTS = 1 << 15
"""The largest number of elements read over all lists of a body."""
_MAX_VALUES = 1 << 16
"""The largest number of values in a list, at any depth, for which its elements are separated."""


_GENERATED_IMAGE = b'"image_generation_call"'
_SCREENS = frozenset({b'"computer_screenshot"', b'"input_image"', b'"image_url"', b'"input_file"'})
"""Types of a tool's output that are one picture or file."""
_TEXT_SOURCES = frozenset({"text", "content"})
"""Sources of a document whose text is in the body."""


class Prompt(Struct, frozen=True, gc=False):
    """A request's input as slices of its body."""

    strings: bytes
    """JSON strings with quotes and escapes as sent, joined by commas."""
    objects: bytes = b""
    """JSON that the engine prints into the prompt: tool schemas and tool calls, joined by commas."""
    messages: int = 0
    """Messages of a chat or inputs of a list: each adds a few tokens of template."""
    token_ids: int = 0
    """The number of tokens sent as ids."""
    media: int = 0
    """The number of images, audio clips and files."""
    templated: bool = False
    """The engine's chat template frames every message."""
    inputs: int = 1
    """The number of inputs that the engine reads separately."""
    repeated: bytes = b""
    """The string among `strings` that is read with every input instead of the first only: the query for a list of documents."""
    longest: "Prompt | None" = None
    """The longest of several inputs by bytes; for documents, with the query. None: there is one input."""
    limit: int = 0
    """The number of tokens to which the engine cuts each input, because the client asks for it. 0: it does not."""

    def texts(self) -> list[str]:
        """Return all text, decoded: the input for a tokenizer."""
        strings = _strings(b"[%b]" % self.strings)
        if strings is None:
            strings = [self.strings.decode(errors="replace")]
        return [*strings, self.objects.decode(errors="replace")] if self.objects else strings


_UNKNOWN = Prompt(b"")
"""Replaces the longest input where it can't be determined; the engine then enforces its limit."""


class _ChatMessage(Struct, gc=False):
    type: Raw = _ABSENT
    result: Raw = _ABSENT
    content: Raw = _ABSENT
    output: Raw = _ABSENT
    arguments: Raw = _ABSENT
    tool_calls: Raw = _ABSENT
    function_call: Raw = _ABSENT
    reasoning_content: Raw = _ABSENT
    reasoning: Raw = _ABSENT


class _Source(Struct, gc=False):
    """Of an Anthropic document or image."""

    type: str = ""
    data: Raw = _ABSENT
    content: Raw = _ABSENT


class _Part(Struct, gc=False):
    type: Raw = _ABSENT
    source: Raw = _ABSENT
    text: Raw = _ABSENT
    content: Raw = _ABSENT
    input: Raw = _ABSENT
    refusal: Raw = _ABSENT
    thinking: Raw = _ABSENT


def _decoder(type_: type[_T]) -> Callable[[bytes | memoryview | Raw], _T | None]:
    decode = msgspec.json.Decoder(type_).decode

    def attempt(raw: bytes | memoryview | Raw) -> _T | None:
        try:
            return decode(raw)
        except msgspec.DecodeError:
            return None

    return attempt


_messages = _decoder(list[_ChatMessage])
_part = _decoder(_Part)
_source = _decoder(_Source)
_strings = _decoder(list[str])
_items = _decoder(list[Raw])
_encode = msgspec.json.Encoder().encode


class _Draft:
    """Accumulates the prompt while a body is read."""

    __slots__ = ("elements_left", "input_count", "longest", "media", "messages", "objects", "repeated", "strings", "templated", "token_ids")

    def __init__(self) -> None:
        self.strings: list[bytes] = []
        self.objects: list[bytes] = []
        self.messages = 0
        self.token_ids = 0
        self.media = 0
        self.templated = False
        self.elements_left = _MAX_TOTAL_ELEMENTS
        self.input_count = 1
        self.repeated = b""
        self.longest: Prompt | None = None

    def build(self) -> Prompt:
        text, objects = b",".join(self.strings), b",".join(self.objects)
        return Prompt(
            strings=text,
            objects=objects,
            messages=self.messages,
            token_ids=self.token_ids,
            media=self.media,
            templated=self.templated,
            inputs=self.input_count,
            repeated=self.repeated,
            longest=self.longest,
        )

    def add_chat(self, raw: memoryview) -> None:
        """Add a list of messages, or a string in its place."""
        self.templated = True
        messages = _messages(raw)
        if messages is None:
            self.messages += 1
            self.add_content(bytes(raw), 0)
            return
        self.messages += len(messages)
        if len(messages) > _MAX_ELEMENTS:
            self.add_object(bytes(raw))
            return
        for message in messages:
            self.add_content(bytes(message.content), 0)
            if message.tool_calls is not _ABSENT:
                self.add_object(bytes(message.tool_calls))
            if message.function_call is not _ABSENT:
                self.add_object(bytes(message.function_call))
            if message.arguments is not _ABSENT:
                self.add_content(bytes(message.arguments), 0)
            if message.reasoning_content is not _ABSENT:
                self.add_content(bytes(message.reasoning_content), 0)
            elif message.reasoning is not _ABSENT:
                self.add_content(bytes(message.reasoning), 0)
            if message.output is not _ABSENT:
                self.add_output(bytes(message.output))
            if message.result is not _ABSENT and bytes(message.type) == _GENERATED_IMAGE:
                self.media += 1

    def add_output(self, raw: bytes) -> None:
        """Add what a tool gave: text, a list of parts, or one part, as a computer's screenshot is."""
        part = _part(raw) if raw.startswith(b"{") else None
        if part is not None and bytes(part.type) in _SCREENS:
            self.media += 1
        else:
            self.add_content(raw, 0)

    def add_content(self, raw: bytes, nesting: int) -> None:
        """Add a string, null, a list of parts, or an unknown object."""
        if raw.startswith(b'"'):
            self.strings.append(raw)
        elif raw.startswith(b"["):
            items = self.split_list(raw) if nesting < _MAX_NESTING else None
            if items is None:
                self.add_object(raw)
                return
            for item in items:
                element = bytes(item)
                found = _part(element) if element.startswith(b"{") else None
                if found is not None:
                    self.add_part(found, nesting)
                else:
                    self.add_content(element, nesting + 1)
        elif raw.startswith(b"{"):
            self.add_object(raw)

    def split_list(self, raw: bytes) -> list[Raw] | None:
        """Split a list into its elements; None: there are too many."""
        if self.elements_left <= 0 or has_more_values(raw, _MAX_VALUES):
            return None
        items = _items(raw)
        if items is None:
            return None
        self.elements_left -= len(items)
        return items if len(items) <= _MAX_ELEMENTS else None

    def add_part(self, part: _Part, nesting: int) -> None:
        """Add a part. Text counts by its length; a part that is neither text nor a tool call counts as one medium."""
        for words in (part.text, part.refusal, part.thinking):
            if words is not _ABSENT:
                self.add_content(bytes(words), nesting + 1)
                return
        document = None if part.source is _ABSENT else _source(part.source)
        if part.content is not _ABSENT:
            self.add_content(bytes(part.content), nesting + 1)
        elif document is not None and document.type in _TEXT_SOURCES:
            self.add_content(bytes(document.data if document.type == "text" else document.content), nesting + 1)
        elif part.input is not _ABSENT:
            self.add_object(bytes(part.input))
        else:
            self.media += 1

    def add_object(self, raw: bytes) -> None:
        """Add a tool call or a tool's schema."""
        if raw != b"null":
            self.objects.append(raw)

    def add_inputs(self, raw: bytes) -> None:
        """Add one text or a list of them, as strings or as token ids; lists may be mixed."""
        if raw.startswith(b'"'):
            self.messages += 1
            self.strings.append(raw)
        elif raw.startswith(b"["):
            if b'"' not in raw and b"{" not in raw:
                self.token_ids += _count_numbers(raw)
                if (lists := raw.count(b"[") - 1) > 1:
                    self.input_count, self.longest = lists, Prompt(b"", token_ids=_count_longest_list(raw))
                return
            strings = _strings(raw)
            if strings is not None:
                self.messages += len(strings)
                self.strings.append(raw.strip()[1:-1])
                if len(strings) > 1:
                    self.input_count, self.longest = len(strings), Prompt(_longest_text(strings, raw), messages=1)
                return
            self.add_mixed(raw)

    def add_mixed(self, raw: bytes) -> None:
        """Add a list of texts, token ids, lists of token ids and objects with texts (Jina's `{"text": ...}`)."""
        items = self.split_list(raw)
        if items is None:
            self.add_object(raw)
            self.longest = _UNKNOWN
            return
        self.messages += len(items)
        longest, most = _UNKNOWN, 0
        for item in items:
            element = bytes(item)
            texts, ids, media = len(self.strings), self.token_ids, self.media
            if element.startswith(b"{"):
                found = _part(element)
                if found is not None:
                    self.add_part(found, 0)
            elif element.startswith(b'"'):
                self.strings.append(element)
            else:
                self.token_ids += _count_numbers(element)
            ids = self.token_ids - ids
            weight = ids * _BYTES_PER_TOKEN if ids else len(element)
            if weight > most and self.media == media:
                longest, most = Prompt(b",".join(self.strings[texts:]), messages=1, token_ids=ids), weight
        if len(items) > 1:
            self.input_count, self.longest = len(items), longest


def _count_numbers(raw: bytes) -> int:
    """Count the numbers in a JSON list of numbers or of lists of numbers; a lone number is one."""
    digits = raw.translate(None, b" \t\r\n")
    empty = digits.count(b"[]")
    return max(0, digits.count(b",") + 1 - empty) if any(map(digits.__contains__, b"0123456789")) else 0


def _count_longest_list(raw: bytes) -> int:
    """Count the numbers in the longest list of a JSON list of lists of numbers."""
    commas = raw.translate(None, _NON_LIST_BYTES).replace(b"],[", b"]").replace(b"[", b"")
    return max(map(len, commas.split(b"]"))) + 1


def _longest_text(strings: list[str], raw: bytes) -> bytes:
    """Return the longest of a list of texts as a JSON string, measured in UTF-8 bytes, which predict tokens better than characters."""
    if raw.isascii() and b"\\u" not in raw:
        return _encode(max(strings, key=len))
    return _encode(max(map(str.encode, strings), key=len).decode())


def _read_chat(draft: _Draft, body: bytes, outline: Outline) -> None:
    draft.add_chat(outline.view(body, "messages"))
    _read_extras(draft, body, outline)


def _read_completion(draft: _Draft, body: bytes, outline: Outline) -> None:
    draft.add_inputs(outline.value(body, "prompt"))
    draft.add_content(outline.value(body, "suffix"), 0)


def _read_rerank(draft: _Draft, body: bytes, outline: Outline) -> None:
    query = outline.value(body, "query")
    draft.add_inputs(query)
    for key in ("documents", "texts"):
        draft.add_inputs(outline.value(body, key))
    if draft.longest is not None and draft.longest.strings and query.startswith(b'"'):
        draft.repeated, draft.longest = query, replace(draft.longest, strings=b"%b,%b" % (query, draft.longest.strings))


def _read_response(draft: _Draft, body: bytes, outline: Outline) -> None:
    draft.add_chat(outline.view(body, "input"))
    draft.add_content(outline.value(body, "instructions"), 0)
    _read_extras(draft, body, outline)


def _read_extras(draft: _Draft, body: bytes, outline: Outline) -> None:
    for key in ("tools", "functions", "response_format", "documents"):
        if key in outline.spans:
            draft.add_object(outline.value(body, key))
    if "system" in outline.spans:
        draft.add_content(outline.value(body, "system"), 0)


_READERS: dict[Operation, Callable[[_Draft, bytes, Outline], None]] = {
    Operation.CHAT: _read_chat,
    Operation.COMPLETIONS: _read_completion,
    Operation.RERANK: _read_rerank,
    Operation.RESPONSES: _read_response,
    Operation.COMPACT: _read_response,
    Operation.INPUT_TOKENS: _read_response,
    Operation.MESSAGES: _read_chat,
    Operation.COUNT_TOKENS: _read_chat,
}
"""Operations whose prompt has more parts than the members that their specification names."""


def extract_prompt(operation: Operation, body: bytes, outline: Outline) -> Prompt:
    """Extract the model's input from a JSON body.

    Args:
        operation: Any that takes JSON.
        body: Valid JSON, nested no deeper than the decoder allows.
        outline: Of that body.
    """
    draft = _Draft()
    reader = _READERS.get(operation)
    if reader is not None:
        reader(draft, body, outline)
        return draft.build()
    for key in operation.spec.prompt:
        if key != "messages":
            draft.add_inputs(outline.value(body, key))
        elif key in outline.spans:
            draft.add_chat(outline.view(body, key))
    return draft.build()

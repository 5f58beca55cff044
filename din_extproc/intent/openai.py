"""The part of a request body that becomes the model's input, per operation.

Rule: tolerant. Whatever a body holds where text is expected, it yields a prompt; whether it makes sense is the engine's business.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from din_extproc.domain.request import Operation
from din_extproc.intent.outline import Outline, holds_more

_T = TypeVar("_T")
_ABSENT = Raw(b"null")
_ALL_BUT_LISTS = bytes(byte for byte in range(256) if byte not in b"[],")
_BYTES_PER_TOKEN = 4
"""Where a text is held against token ids, to tell which input is the longest."""
_MAX_NESTING = 4
"""Levels of parts inside parts that are looked into: a tool's result holds parts of its own, nothing nests deeper."""
_MAX_ELEMENTS = 4096
"""Elements of one list that are looked at one by one. A longer list counts by its bytes, so that no body costs more than its size."""
_MOST_ELEMENTS = 1 << 15
"""Elements of all lists of a body, likewise."""
_MOST_VALUES = 1 << 16
"""Values in a list, at any depth, from which on its elements are not even told apart."""


class Prompt(Struct, frozen=True, gc=False):
    """A request's input, as bytes of its body."""

    strings: bytes
    """JSON strings, quotes and escapes as sent, joined by commas."""
    objects: bytes = b""
    """JSON that the engine prints into the prompt, tool schemas and tool calls, joined by commas."""
    messages: int = 0
    """Messages of a chat, or inputs of a list: each costs the template a little."""
    token_ids: int = 0
    """Tokens that the client sent as numbers."""
    media: int = 0
    """Images, audio and files, however large they are as bytes."""
    templated: bool = False
    """A chat: the engine's template frames every message."""
    inputs: int = 1
    """Of a list, how many the engine reads each by itself."""
    again: bytes = b""
    """The string among `strings` that is read with each of the inputs, not with the first alone: the query of a list of documents."""
    longest: "Prompt | None" = None
    """Of several inputs the longest, as far as bytes tell; of documents, with the query that each is read with. None: it is one input."""

    def texts(self) -> list[str]:
        """Everything that is text, decoded: what a tokenizer is given."""
        strings = _strings(b"[%b]" % self.strings)
        if strings is None:
            strings = [self.strings.decode(errors="replace")]
        return [*strings, self.objects.decode(errors="replace")] if self.objects else strings


_UNKNOWN = Prompt(b"")
"""In place of the longest input, where it can't be told: the engine judges."""


class _ChatMessage(Struct, gc=False):
    content: Raw = _ABSENT
    output: Raw = _ABSENT
    arguments: Raw = _ABSENT
    tool_calls: Raw = _ABSENT
    function_call: Raw = _ABSENT
    reasoning_content: Raw = _ABSENT
    reasoning: Raw = _ABSENT


class _Part(Struct, gc=False):
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
_strings = _decoder(list[str])
_items = _decoder(list[Raw])
_encode = msgspec.json.Encoder().encode


class _Draft:
    """What is gathered while a body is read."""

    __slots__ = ("again", "left", "longest", "media", "messages", "number", "objects", "strings", "templated", "token_ids")

    def __init__(self) -> None:
        self.strings: list[bytes] = []
        self.objects: list[bytes] = []
        self.messages = 0
        self.token_ids = 0
        self.media = 0
        self.templated = False
        self.left = _MOST_ELEMENTS
        self.number = 1
        self.again = b""
        self.longest: Prompt | None = None

    def prompt(self) -> Prompt:
        text, objects = b",".join(self.strings), b",".join(self.objects)
        return Prompt(
            strings=text,
            objects=objects,
            messages=self.messages,
            token_ids=self.token_ids,
            media=self.media,
            templated=self.templated,
            inputs=self.number,
            again=self.again,
            longest=self.longest,
        )

    def chat(self, raw: memoryview) -> None:
        """A list of messages, or a string that stands for one."""
        self.templated = True
        messages = _messages(raw)
        if messages is None:
            self.messages += 1
            self.content(bytes(raw), 0)
            return
        self.messages += len(messages)
        if len(messages) > _MAX_ELEMENTS:
            self.object(bytes(raw))
            return
        for message in messages:
            self.content(bytes(message.content), 0)
            if message.tool_calls is not _ABSENT:
                self.object(bytes(message.tool_calls))
            if message.function_call is not _ABSENT:
                self.object(bytes(message.function_call))
            if message.arguments is not _ABSENT:
                self.content(bytes(message.arguments), 0)
            if message.reasoning_content is not _ABSENT:
                self.content(bytes(message.reasoning_content), 0)
            elif message.reasoning is not _ABSENT:
                self.content(bytes(message.reasoning), 0)
            if message.output is not _ABSENT:
                self.content(bytes(message.output), 0)

    def content(self, raw: bytes, nesting: int) -> None:
        """A string, null, a list of parts, or an object that no interface knows."""
        if raw.startswith(b'"'):
            self.strings.append(raw)
        elif raw.startswith(b"["):
            items = self.elements(raw) if nesting < _MAX_NESTING else None
            if items is None:
                self.object(raw)
                return
            for item in items:
                element = bytes(item)
                found = _part(element) if element.startswith(b"{") else None
                if found is not None:
                    self.part(found, nesting)
                else:
                    self.content(element, nesting + 1)
        elif raw.startswith(b"{"):
            self.object(raw)

    def elements(self, raw: bytes) -> list[Raw] | None:
        """A list's elements; None: there are too many to look at each."""
        if self.left <= 0 or holds_more(raw, _MOST_VALUES):
            return None
        items = _items(raw)
        if items is None:
            return None
        self.left -= len(items)
        return items if len(items) <= _MAX_ELEMENTS else None

    def part(self, part: _Part, nesting: int) -> None:
        """Text counts by its length; what is neither text nor a tool's doing counts as one medium."""
        for words in (part.text, part.refusal, part.thinking):
            if words is not _ABSENT:
                self.content(bytes(words), nesting + 1)
                return
        if part.content is not _ABSENT:
            self.content(bytes(part.content), nesting + 1)
        elif part.input is not _ABSENT:
            self.object(bytes(part.input))
        else:
            self.media += 1

    def object(self, raw: bytes) -> None:
        """A tool call or a tool's schema."""
        if raw != b"null":
            self.objects.append(raw)

    def inputs(self, raw: bytes) -> None:
        """One text or a list of them, as strings or as token ids; lists may be mixed."""
        if raw.startswith(b'"'):
            self.messages += 1
            self.strings.append(raw)
        elif raw.startswith(b"["):
            if b'"' not in raw and b"{" not in raw:
                self.token_ids += _numbers(raw)
                if (lists := raw.count(b"[") - 1) > 1:
                    self.number, self.longest = lists, Prompt(b"", token_ids=_most_numbers(raw))
                return
            strings = _strings(raw)
            if strings is not None:
                self.messages += len(strings)
                self.strings.append(raw.strip()[1:-1])
                if len(strings) > 1:
                    self.number, self.longest = len(strings), Prompt(_longest(strings, raw), messages=1)
                return
            self.mixed(raw)

    def mixed(self, raw: bytes) -> None:
        """A list of texts, token ids, lists of token ids and objects with texts (Jina's `{"text": ...}`)."""
        items = self.elements(raw)
        if items is None:
            self.object(raw)
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
                    self.part(found, 0)
            elif element.startswith(b'"'):
                self.strings.append(element)
            else:
                self.token_ids += _numbers(element)
            ids = self.token_ids - ids
            weight = ids * _BYTES_PER_TOKEN if ids else len(element)
            if weight > most and self.media == media:
                longest, most = Prompt(b",".join(self.strings[texts:]), messages=1, token_ids=ids), weight
        if len(items) > 1:
            self.number, self.longest = len(items), longest


def _numbers(raw: bytes) -> int:
    """How many numbers a JSON list of numbers, or of lists of numbers, holds; a lone number is one."""
    digits = raw.translate(None, b" \t\r\n")
    empty = digits.count(b"[]")
    return max(0, digits.count(b",") + 1 - empty) if any(map(digits.__contains__, b"0123456789")) else 0


def _most_numbers(raw: bytes) -> int:
    """How many numbers the longest of a JSON list's lists of numbers holds."""
    commas = raw.translate(None, _ALL_BUT_LISTS).replace(b"],[", b"]").replace(b"[", b"")
    return max(map(len, commas.split(b"]"))) + 1


def _longest(strings: list[str], raw: bytes) -> bytes:
    """The longest of a list of texts in UTF-8, whose bytes are the better measure of tokens than characters, as a JSON string."""
    if raw.isascii() and b"\\u" not in raw:
        return _encode(max(strings, key=len))
    return _encode(max(map(str.encode, strings), key=len).decode())


def _chat(draft: _Draft, body: bytes, outline: Outline) -> None:
    draft.chat(outline.view(body, "messages"))
    _extras(draft, body, outline)


def _completion(draft: _Draft, body: bytes, outline: Outline) -> None:
    draft.inputs(outline.value(body, "prompt"))
    draft.content(outline.value(body, "suffix"), 0)


def _embedding(draft: _Draft, body: bytes, outline: Outline) -> None:
    draft.inputs(outline.value(body, "input"))
    if "messages" in outline.spans:
        draft.chat(outline.view(body, "messages"))


def _rerank(draft: _Draft, body: bytes, outline: Outline) -> None:
    query = outline.value(body, "query")
    draft.inputs(query)
    for key in ("documents", "texts"):
        draft.inputs(outline.value(body, key))
    if draft.longest is not None and draft.longest.strings and query.startswith(b'"'):
        draft.again, draft.longest = query, replace(draft.longest, strings=b"%b,%b" % (query, draft.longest.strings))


def _response(draft: _Draft, body: bytes, outline: Outline) -> None:
    draft.chat(outline.view(body, "input"))
    draft.content(outline.value(body, "instructions"), 0)
    _extras(draft, body, outline)


def _extras(draft: _Draft, body: bytes, outline: Outline) -> None:
    for key in ("tools", "functions", "response_format", "documents"):
        if key in outline.spans:
            draft.object(outline.value(body, key))
    if "system" in outline.spans:
        draft.content(outline.value(body, "system"), 0)


_READERS: dict[Operation, Callable[[_Draft, bytes, Outline], None]] = {
    Operation.CHAT: _chat,
    Operation.COMPLETIONS: _completion,
    Operation.EMBEDDINGS: _embedding,
    Operation.RERANK: _rerank,
    Operation.RESPONSES: _response,
    Operation.MESSAGES: _chat,
}


def prompt(operation: Operation, body: bytes, outline: Outline) -> Prompt:
    """The model's input in a JSON body.

    Args:
        operation: Any that takes a body.
        body: Valid JSON, nested no deeper than the decoder allows.
        outline: Of that body.
    """
    draft = _Draft()
    _READERS[operation](draft, body, outline)
    return draft.prompt()

"""The frame of a stream translator: what every engine's dialect does with bytes, unreadable messages and errors."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from din_extproc.southbound import events
from din_extproc.southbound.dialect import AnswerContext
from din_extproc.southbound.events import DONE, ChunkEncoder

Message = TypeVar("Message")
"""A decoded message of the engine."""


class _Splitter(Protocol):
    def feed(self, data: bytes) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


class StreamTranslator(Generic[Message]):
    """Translates an engine's messages to the events that the client expects. A dialect defines `_translate` for one message.

    Args:
        messages: Splits the stream into messages.
        decode: Decodes one message. Raises `msgspec.DecodeError` or `UnicodeDecodeError`.
    """

    __slots__ = ("_decode", "_messages", "_over")

    def __init__(self, messages: _Splitter, decode: Callable[[bytes], Message]) -> None:
        self._messages = messages
        self._decode = decode
        self._over = False

    def feed(self, data: bytes) -> bytes:
        """Return the events for the messages that these bytes complete."""
        return b"".join(map(self._message, self._messages.feed(data)))

    def end(self) -> bytes:
        """Return the events for an unterminated last message."""
        return b"".join(map(self._message, self._messages.end()))

    def _message(self, data: bytes) -> bytes:
        if self._over:
            return b""
        try:
            message = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._end_with_error("The node sent something that can't be read.")
        return self._translate(message)

    def _translate(self, message: Message) -> bytes:
        raise NotImplementedError

    def _end_with_error(self, error: object) -> bytes:
        """Return the final events: the engine's error, if it is text."""
        raise NotImplementedError


class ChunkTranslator(StreamTranslator[Message]):
    """Translates to OpenAI's events.

    Args:
        context: The request.
        messages: Splits the stream into messages.
        decode: Decodes one message. Raises `msgspec.DecodeError` or `UnicodeDecodeError`.
    """

    __slots__ = ("_chunks",)

    def __init__(self, context: AnswerContext, messages: _Splitter, decode: Callable[[bytes], Message]) -> None:
        super().__init__(messages, decode)
        self._chunks = ChunkEncoder(context)

    def _end_with_error(self, error: object) -> bytes:
        self._over = True
        return events.error_event(error if isinstance(error, str) else "The node failed.") + DONE

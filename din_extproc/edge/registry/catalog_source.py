"""The catalogue behind a URL: pulled with its ETag, and the last text that came is kept.

Rule: a source that fails, or that answers with something else, changes nothing for whoever has a text already.
"""

import logging
import urllib.error
import urllib.request
from typing import Final

import msgspec
from msgspec import Struct

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 5.0
_LARGEST: Final = 16 << 20
_NOT_MODIFIED: Final = 304


class CatalogUnavailable(Exception):  # noqa: N818 - it says what the source is
    """There is no text: the source never gave one."""


def is_url(source: str) -> bool:
    """Whether the source is asked over HTTP; otherwise it is a file."""
    return source.startswith(("http://", "https://"))


class _Shape(Struct):
    """What every catalogue has; an error page has not."""

    models: list[msgspec.Raw]


class CatalogSource:
    """Pulls texts, and remembers the last one of each URL. Its methods block, for five seconds at most; one thread at a time."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._etags: dict[str, str] = {}
        self._failing = ""

    def read(self, url: str) -> str:
        """The text that was pulled last; without one, it is pulled now.

        Raises:
            Unfetched: it can't be.
        """
        if url not in self._texts:
            self._texts[url] = self._pull(url) or ""
        return self._texts[url]

    def changed(self, url: str) -> bool:
        """Ask again. True: there is another text than before. A failure is said once, and nothing has changed."""
        try:
            text = self._pull(url)
        except CatalogUnavailable as error:
            if str(error) != self._failing:
                _log.error("the catalogue stays as it is: %s", error)
            self._failing = str(error)
            return False
        self._failing = ""
        if text is None or text == self._texts.get(url):
            return False
        self._texts[url] = text
        return True

    def _pull(self, url: str) -> str | None:
        """The text; None: it is the one that is known.

        Raises:
            Unfetched: there is no sound answer.
        """
        headers = {"accept": "application/json"}
        if url in self._texts and self._etags.get(url):
            headers["if-none-match"] = self._etags[url]
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http and https only, see `is_url`
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:  # noqa: S310 - likewise
                body, etag = reply.read(_LARGEST + 1), reply.headers.get("etag", "")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == _NOT_MODIFIED:
                    return None
                raise CatalogUnavailable(f"{url} answers {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            raise CatalogUnavailable(f"{url}: {getattr(error, 'reason', error)}") from error
        if len(body) > _LARGEST:
            raise CatalogUnavailable(f"{url}: more than {_LARGEST >> 20} MiB")
        try:
            msgspec.json.decode(body, type=_Shape)
            text: str = body.decode()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CatalogUnavailable(f"{url} answers with no catalogue: {error}") from error
        self._etags[url] = etag
        return text

"""Catalogue from a URL: fetched with its ETag; the last valid text is kept.

Invariant: a failed fetch or an invalid response keeps the current catalogue.
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
    """No catalogue is available: no fetch of the source succeeded."""


def is_url(source: str) -> bool:
    """Return whether the source is an HTTP URL; otherwise it is a file."""
    return source.startswith(("http://", "https://"))


class _Shape(Struct):
    """Required part of a catalogue, which distinguishes it from an error page."""

    models: list[msgspec.Raw]


class CatalogSource:
    """Fetches catalogues and keeps the last text of each URL. Methods block for at most five seconds; use one thread at a time."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._etags: dict[str, str] = {}
        self._failing = ""

    def read(self, url: str) -> str:
        """Return the last text; fetch it if there is none.

        Raises:
            CatalogUnavailable: The fetch failed.
        """
        if url not in self._texts:
            self._texts[url] = self._pull(url) or ""
        return self._texts[url]

    def changed(self, url: str) -> bool:
        """Fetch again. Return whether the text changed. A repeated failure is logged once."""
        try:
            text = self._pull(url)
        except CatalogUnavailable as error:
            if str(error) != self._failing:
                _log.error("the catalogue was not updated, the last one stays in use: %s", error)
            self._failing = str(error)
            return False
        self._failing = ""
        if text is None or text == self._texts.get(url):
            return False
        self._texts[url] = text
        return True

    def _pull(self, url: str) -> str | None:
        """Fetch the text; None: not modified.

        Raises:
            CatalogUnavailable: There is no valid response.
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
            raise CatalogUnavailable(f"{url}: the response is not a catalogue: {error}") from error
        self._etags[url] = etag
        return text

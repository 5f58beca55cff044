"""Hands the credentials of remote APIs to Envoy: one SDS file per node, which Envoy watches.

Invariant: a secret goes from its source into its file and nowhere else. A file is replaced as a whole, and only its owner can read it.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from din_extproc.domain.node import EGRESS_PREFIX, CredentialSource, Node, Pool
from din_extproc.edge.replace_file import replace_file

_log = logging.getLogger(__name__)
_TYPE = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"


class CredentialUnavailable(Exception):  # noqa: N818 - it says what the credential is
    """A credential can't be read or written; the message names the node and the source, never the content."""


def read_credential(source: CredentialSource, env: Mapping[str, str]) -> str:
    """Return a credential without the white space around it.

    Raises:
        CredentialUnavailable: the variable or the file is missing, empty, or holds several lines.
    """
    if source.env is not None:
        name, text = f"environment variable {source.env}", env.get(source.env, "")
    else:
        name = f"file {source.file}"
        try:
            text = Path(source.file or "").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror or "can't be read").lower() if isinstance(error, OSError) else "not UTF-8 text"
            raise CredentialUnavailable(f"the {name} can't be read: {reason}") from None
    found = text.strip()
    if not found:
        raise CredentialUnavailable(f"the {name} is not set or empty")
    if not (found.isascii() and found.isprintable()):
        raise CredentialUnavailable(f"the {name} has more than one line, or characters that are invalid in a header")
    return found


class CredentialFiles:
    """The SDS files of all remote APIs.

    Args:
        env: The environment variables.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._problems: tuple[str, ...] = ()

    def write(self, pools: Iterable[Pool], folder: Path) -> tuple[str, ...]:
        """Write the files whose content has changed. Return the problems, each of which is logged once; a former file stays."""
        found = []
        for node in (node for pool in pools for node in pool.nodes):
            if node.remote is not None and node.remote.credential is not None:
                prefix = node.remote.credential_header[1]  # Envoy 1.36 adds none by itself
                try:
                    _replace(folder / f"{node.id}.yaml", _format_secret(node, prefix + read_credential(node.remote.credential, self._env)))
                except CredentialUnavailable as error:
                    found.append(f"node {node.id}: {error}")
                except OSError as error:
                    found.append(f"node {node.id}: {folder} can't be written: {(error.strerror or 'unknown reason').lower()}")
        for problem in found:
            if problem not in self._problems:
                _log.error("credential not written for Envoy: %s", problem)
        self._problems = tuple(found)
        return self._problems


def _format_secret(node: Node, value: str) -> str:
    secret = {"@type": _TYPE, "name": f"{EGRESS_PREFIX}{node.id}", "generic_secret": {"secret": {"inline_string": value}}}
    return json.dumps({"resources": [secret]}) + "\n"  # JSON is YAML


def _replace(file: Path, text: str) -> None:
    """Write a new file and move it into place: Envoy notices only moves."""
    try:
        if file.read_text() == text:
            return
    except OSError:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(file, text.encode(), mode=0o600, durable=False)

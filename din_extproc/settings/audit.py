"""`audit:`, where the audit log is kept, how, and with which keys it is signed.

Rule: without the section nothing is recorded; a key is read once and never shown, not even in a problem.
"""

import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from din_extproc.audit.chain import SHORTEST_KEY, SigningKey
from din_extproc.settings.document import Document
from din_extproc.settings.section import Name, Section, Text

_HOUR_S = 3600
_MIB = 1 << 20


class AuditKeySection(Section):
    """One key: a file that holds it, or itself (from the environment)."""

    file: Text | None = None
    """Relative to the configuration. White space at its end is not part of the key."""
    value: Annotated[SecretStr | None, Field(strict=False)] = None

    @model_validator(mode="after")
    def _check_one_given(self) -> "AuditKeySection":
        if (self.file is None) == (self.value is None):
            raise ValueError("either `file` or `value`, one of them")
        return self


class AuditSection(Section):
    """`audit:`."""

    folder: Text
    """Relative to the configuration."""
    replica: Name | None = None
    """Prefix of this sidecar's file names. None: the host's name."""
    keys: Annotated[dict[Name, AuditKeySection], Field(min_length=1)]
    """By id. The last one signs; those before it are what older files were signed with."""
    fsync: Literal["always", "interval", "never"] = "interval"
    fsync_s: Annotated[float, Field(strict=False, ge=0.05, le=3600)] = 1.0
    flush_ms: Annotated[int, Field(ge=1, le=10_000)] = 100
    rotate_mib: Annotated[float, Field(strict=False, ge=0.001, le=1024)] = 64
    rotate_h: Annotated[float, Field(strict=False, ge=0.001, le=8760)] = 24
    on_full: Literal["drop_with_alarm", "block", "refuse"] = "drop_with_alarm"
    """When the disk takes no more: records are lost and that is said, or requests wait, or requests are refused."""
    block_ms: Annotated[int, Field(ge=1, le=60_000)] = 2000
    """Under `block`: how long a request waits before it is refused. Shorter than `envoy.timeouts.message_ms`."""


class AuditSettings(Section):
    """The section with its keys."""

    section: AuditSection
    folder: Path
    replica: str
    keys: tuple[SigningKey, ...]

    @property
    def rotate_bytes(self) -> int:
        """When a file is full."""
        return int(self.section.rotate_mib * _MIB)

    @property
    def rotate_s(self) -> float:
        """When a file is old."""
        return self.section.rotate_h * _HOUR_S


def read_audit(section: AuditSection | None, document: Document, path: Path) -> tuple[AuditSettings | None, tuple[str, ...]]:
    """The section of the configuration at `path` with its keys, and the files that hold them; what is wrong with them is reported."""
    if section is None:
        return None, ()
    keys, files = [], []
    for name, written in section.keys.items():
        place = ("audit", "keys", name)
        if written.file is not None:
            file = path.parent / written.file
            files.append(str(file))
            try:
                secret = file.read_bytes().rstrip()
            except OSError as error:
                document.report((*place, "file"), f"{file}: can't be read: {(error.strerror or str(error)).lower()}")
                continue
        else:
            secret = b"" if written.value is None else written.value.get_secret_value().encode()
        if len(secret) < SHORTEST_KEY:
            hint = "make one with `openssl rand -hex 32`"
            document.report(place, f"the key has {len(secret)} bytes: at least {SHORTEST_KEY} are needed", hint)
        keys.append(SigningKey(name, secret))
    replica = section.replica or socket.gethostname()
    return AuditSettings(section=section, folder=path.parent / section.folder, replica=replica, keys=tuple(keys)), tuple(files)

"""What `deploy/` ships, as its tests read it."""

import re
from pathlib import Path

from din_extproc.admit.keys import Authenticated, KeyRing
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_KEY = re.compile(r"din_[A-Za-z0-9-]+_[A-Za-z0-9_-]{43}")


def published_key_opens(config: Path, text: str) -> bool:
    """Whether the one key that a text shows is a tenant's in this configuration."""
    settings = load(config, {})
    assert isinstance(settings, Settings), str(settings)
    [key] = set(_KEY.findall(text))
    return isinstance(KeyRing(settings.keys).authenticate(f"Bearer {key}", "", 0.0), Authenticated)

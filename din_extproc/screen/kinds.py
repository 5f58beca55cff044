r"""Kinds of sensitive data, as RE2 patterns whose time is linear in the text.

Rule: what is found begins after an escape of JSON inside JSON (`\n` in a tool call's arguments), never inside one: cutting it out leaves
that JSON readable.
"""

from collections.abc import Callable, Mapping

import re2
from msgspec import Struct

from din_extproc.screen import proofs

_LEAD = r'(?:^|\\u[0-9A-Fa-f]{4}|\\["\\/bfnrt]|[^\w.\\])'
_CARD = r"(?:4\d|5[1-5]|2[2-7]|6[0245]|81|3\d)"
_TOKEN = r"[\w-]"  # noqa: S105 - a character class
_SECRETS = (
    rf"sk-{_TOKEN}{{20,}}",  # OpenAI, Anthropic, OpenRouter
    r"(?:AKIA|ASIA)[0-9A-Z]{16}",  # AWS
    r"gh[pousr]_[0-9A-Za-z]{36,}",  # GitHub
    r"github_pat_\w{22,}",
    rf"glpat-{_TOKEN}{{20,}}",  # GitLab
    r"xox[abeoprs]-[0-9A-Za-z-]{10,}",  # Slack
    rf"AIza{_TOKEN}{{35}}",  # Google
    rf"ya29\.{_TOKEN}{{20,}}",
    r"[rs]k_(?:live|test)_[0-9A-Za-z]{16,}",  # Stripe
    r"hf_[0-9A-Za-z]{30,}",  # Hugging Face
    r"npm_[0-9A-Za-z]{36}",
    rf"pypi-{_TOKEN}{{40,}}",
    rf"SG\.{_TOKEN}{{16,}}\.{_TOKEN}{{16,}}",  # SendGrid
    r"din_[0-9A-Za-z.-]+_[0-9A-Za-z]{43}",  # our own
    rf"eyJ{_TOKEN}{{8,}}\.eyJ{_TOKEN}{{8,}}\.{_TOKEN}*",  # JSON web tokens
)
_PEM = r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
_MEMORY = 64 << 20


class SensitiveShape(Struct, frozen=True):
    """One way a kind looks."""

    pattern: str
    """RE2 syntax."""
    proof: Callable[[bytes], bool] = proofs.certain
    alone: bool = True
    """The pattern is a word of its own: something else stands before it."""

    @property
    def led(self) -> str:
        """The pattern with what stands before it; the first group is the finding."""
        return f"{_LEAD}({self.pattern})" if self.alone else f"({self.pattern})"


class SensitiveKind(Struct, frozen=True):
    """One kind of sensitive data."""

    name: str
    shapes: tuple[SensitiveShape, ...]

    @property
    def mark(self) -> bytes:
        """Its replacement in the prompt."""
        return b"[%b]" % self.name.upper().replace("-", "_").encode()


def _make_shape(pattern: str, proof: Callable[[bytes], bool] = proofs.certain, tail: str = r"\b") -> SensitiveShape:
    return SensitiveShape(f"(?:{pattern}){tail}", proof)


BUILT_IN: Mapping[str, SensitiveKind] = {
    kind.name: kind
    for kind in (
        SensitiveKind("secret", (_make_shape("|".join(_SECRETS), tail=""), SensitiveShape(_PEM, alone=False))),
        SensitiveKind(
            "national_id",
            (
                _make_shape(r"[1-9]\d{5}(?:18|19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx]", proofs.china),
                _make_shape(r"\d{3}-\d{2}-\d{4}", proofs.united_states),
                _make_shape(r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z](?: ?\d{2}){3} ?[A-D]"),  # United Kingdom
                _make_shape(r"(?:\d{8}|[XYZ]\d{7})-?[A-Z]", proofs.spain),
                _make_shape(r"[12] ?\d{2} ?(?:0[1-9]|1[0-2]) ?\d{2} ?\d{3} ?\d{3} ?\d{2}", proofs.france),
                _make_shape(r"\d{3}\.\d{3}\.\d{3}-\d{2}", proofs.brazil),
            ),
        ),
        SensitiveKind(
            "bank_card",
            (
                _make_shape(rf"{_CARD}\d{{11,17}}", proofs.luhn),
                _make_shape(rf"{_CARD}\d{{2}}[ -]\d{{4}}[ -]\d{{4}}[ -]\d{{4}}[ -]\d{{1,3}}", proofs.luhn),
                _make_shape(rf"{_CARD}\d{{2}}[ -]\d{{4}}[ -]\d{{4}}[ -]\d{{4}}", proofs.luhn),
                _make_shape(r"3[0-9]\d{2}[ -]\d{6}[ -]\d{4,5}", proofs.luhn),
            ),
        ),
        SensitiveKind(
            "phone",
            (
                _make_shape(r"(?:\+?86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}"),
                _make_shape(r"\+[1-9](?:[ .()-]{0,2}\d){7,14}"),
                _make_shape(r"(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[.-])[2-9]\d{2}[.-]\d{4}"),
            ),
        ),
        SensitiveKind("email", (_make_shape(r"[\w.%+'-]+@[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*\.[A-Za-z]{2,24}"),)),
    )
}
"""By name, the ones that win where findings overlap first."""


def custom(name: str, pattern: str) -> SensitiveKind:
    """A kind of the operator's own: the whole match is the finding.

    Raises:
        ValueError: the pattern is none that RE2 takes, or it matches the empty text.
    """
    kind = SensitiveKind(name, (SensitiveShape(pattern, alone=False),))
    if compiled(pattern).search(b"") is not None:
        raise ValueError("the pattern matches the empty text: it would be found everywhere")
    return kind


def compiled(pattern: str, *, groups: bool = False) -> "re2._Regexp":
    """An RE2 pattern. Without groups, even matches of a megabyte are found quickly.

    Raises:
        ValueError: it is none, with RE2's reason.
    """
    try:
        return re2.compile(pattern, options(groups=groups))
    except re2.error as error:
        reason = error.args[0] if error.args else b""
        raise ValueError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from error


def options(*, groups: bool = False) -> "re2.Options":
    """How patterns are compiled: quietly, with room for the states that long texts need."""
    chosen = re2.Options()
    chosen.log_errors = False
    chosen.max_mem = _MEMORY
    chosen.never_capture = not groups
    return chosen

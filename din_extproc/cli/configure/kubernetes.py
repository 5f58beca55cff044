"""Syntax checks of Kubernetes names in the options of `render`.

Rule: a name that no cluster accepts is a wrong call (`BadParameter`); whether the object exists is not checked.
"""

import re
from ipaddress import ip_address

import typer

_WORD = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LONGEST = 253
_is_word = re.compile(_WORD).fullmatch
_is_dotted = re.compile(rf"{_WORD}(?:\.{_WORD})*").fullmatch
_is_label_name = re.compile(_LABEL_NAME).fullmatch


def host(text: str) -> str:
    """Return a host that clients call: a DNS name, or `*.` and one."""
    if not _dotted(text.removeprefix("*.")) or _is_address(text):
        raise typer.BadParameter(f"{text!r} is no host's name such as llm.example.com or *.example.com, in lower case")
    return text


def mesh_host(text: str) -> str:
    """Return a host for Istio, which also accepts an IP address and `*`."""
    return text if text == "*" or _is_address(text) else host(text)


def namespace(text: str) -> str:
    """Return the name of a namespace."""
    if _is_word(text) is None:
        raise typer.BadParameter(f"{text!r} is no namespace: 1-63 lower-case letters, digits and '-', a letter or digit first and last")
    return text


def resource(text: str) -> str:
    """Return the name of a resource or of a Gateway's listener."""
    if not _dotted(text):
        raise typer.BadParameter(
            f"{text!r} is no resource's name: lower-case letters, digits, '-' and '.', a letter or digit first and last"
        )
    return text


def resource_reference(text: str) -> str:
    """Return a reference to a resource: name, or namespace/name."""
    where, _, name = text.rpartition("/")
    if where or "/" in text:
        namespace(where)
    resource(name)
    return text


def label(text: str) -> tuple[str, str]:
    """Split `label=value`; a label may have a prefix before `/`, a value may be empty."""
    name, equals, value = text.partition("=")
    prefix, slash, own = name.rpartition("/")
    if not equals or (slash and not _dotted(prefix)) or _is_label_name(own) is None or (value and _is_label_name(value) is None):
        raise typer.BadParameter(f"{text!r} is not label=value as Kubernetes writes labels", param_hint="--selector")
    return name, value


def _dotted(text: str) -> bool:
    return len(text) <= _LONGEST and _is_dotted(text) is not None


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True

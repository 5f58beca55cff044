"""The role `render`: Envoy's configuration out of `din.yaml`.

Rule: what is printed was accepted by an Envoy of this machine, where there is one.
"""

from importlib.resources import files

from din_extproc.edge.envoy_binary import complaint, find_envoy
from din_extproc.settings.settings import Settings


class Unrenderable(Exception):  # noqa: N818 - it says what the configuration is
    """Envoy refuses what the configuration asks for; the message names the field."""


def render_envoy(settings: Settings, *, validate: bool = False) -> str:
    """Envoy's bootstrap as YAML.

    Args:
        settings: A sound configuration.
        validate: Ask the Envoy of this machine, when there is one, whether it would start with it.

    Raises:
        Unrenderable: it would not.
    """
    from din_extproc.control.bootstrap import as_yaml  # noqa: PLC0415 - three seconds, for those who render only

    text = as_yaml(settings.topology(usage_lua()))
    binary = find_envoy() if validate else None
    refused = None if binary is None else complaint(text, binary)
    if refused is not None:
        raise Unrenderable(f"Envoy refuses the rendered configuration: {refused}")
    return text


def usage_lua() -> str:
    """The source of the filter that counts what nodes answer (a link to `envoy/lua/usage.lua`)."""
    return files("din_extproc.control").joinpath("usage.lua").read_text()

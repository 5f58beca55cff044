"""From settings to what decisions read.

Rule: pure but for the tokenizers, which are named here and loaded by whoever owns them.
"""

import socket
import zlib

from din_extproc.admit.keys import KeyRing
from din_extproc.flow.view import ModelFacts, TokenCounter, View
from din_extproc.settings.settings import Settings

_MIB = 1 << 20
_NODE_NUMBERS = 1 << 16


def make_view(settings: Settings, counters: dict[str, TokenCounter]) -> View:
    """The view of one configuration.

    Args:
        settings: A sound configuration.
        counters: Tokenizers by physical model, of those that have one.
    """
    models = {}
    for model in {pool.model for pool in settings.pools}:
        described = settings.catalog.model(model)
        defaults = ModelFacts()
        models[model] = ModelFacts(
            output_tokens_default=defaults.output_tokens_default if described is None else described.output_tokens_default,
            boundaries=_boundaries(settings, model),
            counter=counters.get(model),
        )
    return View(settings.routes, KeyRing(settings.keys), models, settings.envoy.body_limit_mib * _MIB)


def tokenizer_folders(settings: Settings) -> dict[str, str]:
    """Physical model -> folder of its tokenizer, for the models that have one."""
    described = {pool.model: settings.catalog.model(pool.model) for pool in settings.pools}
    return {model: entry.tokenizer for model, entry in described.items() if entry is not None and entry.tokenizer is not None}


def node_names(settings: Settings) -> dict[str, str]:
    """Node id by endpoint, as access logs name them."""
    return {str(node.endpoint): node.id for pool in settings.pools for node in pool.nodes}


def node_number(settings: Settings) -> int:
    """The gateway's number inside trace ids: as configured, else from the host's name."""
    if settings.gateway.node_number is not None:
        return settings.gateway.node_number
    return zlib.crc32(socket.gethostname().encode()) % _NODE_NUMBERS


def _boundaries(settings: Settings, model: str) -> tuple[int, ...]:
    """Prompt sizes at which a request for the model goes elsewhere or nowhere."""
    lengths = {node.max_seq_len for pool in settings.pools if pool.model == model for node in pool.nodes}
    return tuple(sorted({*lengths, *settings.token_thresholds}))

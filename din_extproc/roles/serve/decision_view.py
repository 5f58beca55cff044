"""Builds what decisions read (`DecisionView`) from the settings.

Rule: a valid configuration always gives a view; tokenizers that can't be loaded are logged and left out.
"""

import logging
import socket
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from din_extproc.admit.identities import Identities
from din_extproc.admit.keys import KeyRing
from din_extproc.domain.identity import NO_IDENTITIES
from din_extproc.domain.tenant import OnSensitive, SensitiveData
from din_extproc.edge.tokenizers import ModelTokenizer, TokenizerUnavailable
from din_extproc.flow.view import NO_GLOBAL_LIMITS, UNLISTED, DecisionView, ModelFacts, ScreeningPolicy, TokenCounter
from din_extproc.screen.find import Screen
from din_extproc.screen.kinds import BUILT_IN, custom
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_NODE_NUMBERS = 1 << 16


def make_view(settings: Settings, counters: Mapping[str, TokenCounter]) -> DecisionView:
    """Return the view of one configuration.

    Args:
        settings: A valid configuration.
        counters: The tokenizers that there are, by physical model.
    """
    models = {}
    for model in {pool.model for pool in settings.pools}:
        known = ModelFacts(boundaries=_boundaries(settings, model), counter=counters.get(model))
        described = settings.catalog.model(model)
        if described is not None:
            known = replace(known, output_tokens_default=described.output_tokens_default, media_tokens=described.media_tokens)
        models[model] = known
    models |= {adapter: models[pool.model] for pool in settings.pools for adapter in pool.adapters.names}
    global_limits = NO_GLOBAL_LIMITS if settings.global_limits == NO_GLOBAL_LIMITS else settings.global_limits
    screenings, pool_screenings = _screenings(settings)
    return DecisionView(
        table=settings.routes,
        keys=KeyRing(settings.keys),
        identities=None if settings.identity == NO_IDENTITIES else Identities(settings.identity, settings.tenants),
        models=models,
        body_limit=settings.body_limit,
        operations=settings.operations,
        global_limits=global_limits,
        pools={pool.name: pool for pool in settings.pools},
        prices=settings.prices,
        budgets=settings.budgets,
        screenings=screenings,
        pool_screenings=pool_screenings,
        health_paths=settings.envoy.health_paths,
        session_header=settings.gateway.session_header or "",
    )


def _screenings(settings: Settings) -> tuple[dict[str, ScreeningPolicy], dict[str, ScreeningPolicy]]:
    """Return the screening policies by tenant and by pool. Those with the same kinds share a screen, whose tables are large."""
    own = {name: custom(name, pattern) for name, pattern in settings.sensitive_patterns.items()}
    kinds = {**own, **BUILT_IN}
    screens: dict[tuple[str, ...], Screen] = {}

    def policies(wanted: Iterable[tuple[str, SensitiveData]]) -> dict[str, ScreeningPolicy]:
        found = {}
        for owner, data in wanted:
            if data.policy is not OnSensitive.OFF:
                names = tuple(name for name in kinds if data.kinds is None or name in data.kinds)
                if names not in screens:
                    screens[names] = Screen(kinds[name] for name in names)
                found[owner] = ScreeningPolicy(data.policy, screens[names])
        return found

    by_tenant = [(tenant.id, tenant.sensitive_data) for tenant in settings.tenants]
    if settings.identity.unlisted is not None:
        by_tenant.append((UNLISTED, settings.identity.unlisted.sensitive_data))
    return policies(by_tenant), policies((pool.name, pool.sensitive_data) for pool in settings.pools)


async def load_tokenizers(settings: Settings) -> dict[str, TokenCounter]:
    """Load the tokenizers that the catalogue names, by physical model. One that fails is logged and left out: lengths are estimated."""
    counters: dict[str, TokenCounter] = {}
    for model in sorted({pool.model for pool in settings.pools}):
        described = settings.catalog.model(model)
        if described is None or described.tokenizer is None:
            continue
        tokenizer = ModelTokenizer(Path(described.tokenizer))
        try:
            await tokenizer.load()
        except TokenizerUnavailable as error:
            _log.error("tokenizer of %s failed to load, token counts are estimated: %s", model, error)
        else:
            counters[model] = tokenizer
    return counters


def node_names(settings: Settings) -> dict[str, str]:
    """Return node ids by endpoint, as access logs name them."""
    return {str(node.endpoint): node.id for pool in settings.pools for node in pool.nodes}


def half_lives_s(settings: Settings) -> dict[str, float]:
    """Return the half-life of pace statistics by pool, where it is set."""
    return {pool.name: seconds for pool in settings.pools if (seconds := pool.scheduler_options.get("half_life_s")) is not None}


def node_number(settings: Settings) -> int:
    """Return the gateway's number in trace ids: as configured, else from the host name."""
    if settings.gateway.node_number is not None:
        return settings.gateway.node_number
    return zlib.crc32(socket.gethostname().encode()) % _NODE_NUMBERS


def _boundaries(settings: Settings, model: str) -> tuple[int, ...]:
    """Return the prompt lengths at which a request is routed differently or refused."""
    lengths = {node.max_seq_len for pool in settings.pools if pool.model == model for node in pool.nodes}
    if settings.gateway.registry is not None:
        lengths |= {entry.max_seq_len for entry in settings.catalog.versions(model).values()}
    return tuple(sorted({*lengths, *settings.token_thresholds}))

"""The file that `prices.file` names, or the prices of the configuration itself.

Rule: the file is part of the configuration: it is watched, and a broken one leaves the old prices in use.
"""

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from din_extproc.domain.node import Pool
from din_extproc.route.flaw import did_you_mean
from din_extproc.settings.document import Document, read_yaml
from din_extproc.settings.prices import ModelPrices, PricesSection
from din_extproc.settings.problems import ConfigProblem, Place
from din_extproc.settings.section import Section
from din_extproc.settings.shape import validated


class PricesFile(Section):
    """The file that `prices.file` names."""

    models: ModelPrices = Field(default_factory=dict)


def read_prices(
    section: PricesSection | None, document: Document, path: Path, pools: Iterable[Pool]
) -> tuple[str | None, str, ModelPrices, list[ConfigProblem]]:
    """Return the file of the prices, its text, the prices, and what is wrong with that file."""
    if section is None:
        return None, "", {}, []
    served = frozenset(model for pool in pools for model in pool.models)
    if section.file is None:
        _report_unserved(section.models, served, document, ("prices", "models"))
        return None, "", section.models, []
    file = path.parent / section.file
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        document.report(("prices", "file"), f"{file}: can't be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}")
        return str(file), "", {}, []
    own = read_yaml(text, str(file), {})
    found = PricesFile() if own.data is None else validated(PricesFile, own)
    models = {} if found is None else found.models
    _report_unserved(models, served, own, ("models",))
    return str(file), text, models, own.problems


def _report_unserved(models: Iterable[str], served: frozenset[str], document: Document, section: Place) -> None:
    """Warn about models that no pool serves: often a misspelled name, sometimes a model of a later rollout."""
    for name in models:
        if served and name not in served:
            document.report((*section, name), f"no pool serves a model {name!r}", did_you_mean(name, served), at_key=True, warning=True)

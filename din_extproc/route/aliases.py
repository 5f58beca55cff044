"""Logical model names, resolved to physical models when the configuration is loaded.

Cycles and long chains are refused here, so that no request follows a chain.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from din_extproc.route.flaw import Flaw, Place, did_you_mean
from din_extproc.route.versions import parse_constraint

MAX_CHAIN = 8
EVERY_MODEL = "*"


class Alias(Struct, frozen=True, gc=False):
    """A logical name. Its targets are physical models or other aliases, the preferred one first; `*` is every physical model."""

    name: str
    targets: tuple[str, ...]
    version: str = ""
    """A version constraint on its targets."""
    listed: bool = False
    """Written as a list, which determines the targets' place in the configuration."""

    def place(self, index: int) -> Place:
        """Return the target's place in the configuration."""
        return ("aliases", self.name, "models", index) if self.listed else ("aliases", self.name, "model")


Reach = dict[str, str]
"""Physical model -> version constraint, the preferred model first."""


def resolve_aliases(aliases: Sequence[Alias], models: Sequence[str]) -> tuple[dict[str, Reach], list[Flaw]]:
    """Return every alias's physical models, and all flaws. A flawed alias resolves to nothing."""
    resolver = _AliasResolver({alias.name: alias for alias in aliases}, models)
    reaches = {alias.name: resolver.resolve(alias, ()) for alias in aliases}
    return reaches, resolver.flaws


class _AliasResolver:
    """One pass over all aliases; each is resolved once."""

    def __init__(self, aliases: Mapping[str, Alias], models: Sequence[str]) -> None:
        self.flaws: list[Flaw] = []
        self._aliases = aliases
        self._models = models
        self._known = frozenset(models)
        self._folded = {name.casefold(): name for name in aliases}
        self._resolved: dict[str, Reach] = {}
        self._depth: dict[str, int] = {}
        """The length of the chain that an alias starts, itself included; 1 for a flawed alias, so that each flaw is reported once."""
        self._reported: set[frozenset[str]] = set()

    def resolve(self, alias: Alias, path: tuple[str, ...]) -> Reach:
        if alias.name in self._resolved:
            return self._resolved[alias.name]
        path = (*path, alias.name)
        before = len(self.flaws)
        self._check(alias)
        reach: Reach = {}
        depth = 1
        for index, target in enumerate(alias.targets):
            for model, version in self._resolve_target(alias, index, target, path).items():
                self._add_model(reach, model, version, alias)
            depth = max(depth, 1 + self._depth.get(target, 0))
        if len(self.flaws) > before:
            reach, depth = {}, 1
        self._resolved[alias.name] = reach
        self._depth[alias.name] = depth
        return reach

    def _check(self, alias: Alias) -> None:
        if alias.name in self._known:
            self.flaws.append(
                Flaw(
                    ("aliases", alias.name),
                    f"{alias.name!r} is also a model that a pool serves",
                    "rename the alias: a model's name is its own",
                )
            )
        if parse_constraint(alias.version) is None:
            self.flaws.append(_flaw_invalid_version(("aliases", alias.name, "version"), alias.version))

    def _resolve_target(self, alias: Alias, index: int, target: str, path: tuple[str, ...]) -> Reach:
        if target == EVERY_MODEL:
            return dict.fromkeys(self._models, alias.version)
        if target in self._known:
            return {target: alias.version}
        next_name = target if target in self._aliases else self._folded.get(target.casefold(), "")
        if next_name in path:
            self._report_cycle(alias, index, (*path[path.index(next_name) :], target))
            return {}
        if target not in self._aliases:
            self.flaws.append(_flaw_unknown_target(alias.place(index), target, [*self._models, *self._aliases]))
            return {}
        if len(path) + self._depth.get(target, 1) > MAX_CHAIN:
            chain = " -> ".join((*path, target))
            self.flaws.append(
                Flaw(alias.place(index), f"more than {MAX_CHAIN} aliases in a chain: {chain}", "let the alias name the model itself")
            )
            return {}
        reach = self.resolve(self._aliases[target], path)
        return {model: ",".join(filter(None, (version, alias.version))) for model, version in reach.items()}

    def _add_model(self, reach: Reach, model: str, version: str, alias: Alias) -> None:
        if reach.setdefault(model, version) != version:
            message = f"{alias.name!r} reaches {model!r} under two version constraints: {reach[model]!r} and {version!r}"
            self.flaws.append(Flaw(("aliases", alias.name), message, "keep one"))

    def _report_cycle(self, alias: Alias, index: int, cycle: tuple[str, ...]) -> None:
        members = frozenset(name.casefold() for name in cycle)
        if members not in self._reported:
            self._reported.add(members)
            self.flaws.append(Flaw(alias.place(index), f"aliases form a cycle: {' -> '.join(cycle)}", "one of them must name a model"))


def _flaw_invalid_version(place: Place, text: str) -> Flaw:
    return Flaw(place, f"{text!r} is not a version constraint", "write for example '>=2025.3,<2026', '~2025.3', '2025.3.*' or '2025.3.1'")


def _flaw_unknown_target(place: Place, name: str, known: Collection[str]) -> Flaw:
    hint = did_you_mean(name, known) or "a model is known when a pool serves it"
    return Flaw(place, f"{name!r} is neither a model that a pool serves nor an alias", hint, missing=("models", name))

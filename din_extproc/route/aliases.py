"""Logical model names (R06): followed to the physical models they stand for, before any request asks.

Rule: a chain that comes back to itself or grows long is refused here, so that no request ever walks one.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from din_extproc.route.flaw import Flaw, Place, did_you_mean
from din_extproc.route.versions import parse_constraint

LONGEST_CHAIN = 8
EVERY_MODEL = "*"


class Alias(Struct, frozen=True, gc=False):
    """A logical name. Its targets are physical models or other aliases, the preferred one first; `*` is every physical model."""

    name: str
    targets: tuple[str, ...]
    version: str = ""
    """A version constraint for whatever it stands for."""
    listed: bool = False
    """Written as a list: where a target stands in the configuration."""

    def place(self, index: int) -> Place:
        """Where the target stands in the configuration."""
        return ("aliases", self.name, "models", index) if self.listed else ("aliases", self.name, "model")


Reach = dict[str, str]
"""Physical model -> version constraint, the preferred model first."""


def resolve(aliases: Sequence[Alias], models: Sequence[str]) -> tuple[dict[str, Reach], list[Flaw]]:
    """Every alias's physical models, and every flaw of every alias. A flawed alias reaches nothing."""
    walk = _Walk({alias.name: alias for alias in aliases}, models)
    reaches = {alias.name: walk.reach(alias, ()) for alias in aliases}
    return reaches, walk.flaws


class _Walk:
    """One pass over all aliases; each is followed once."""

    def __init__(self, aliases: Mapping[str, Alias], models: Sequence[str]) -> None:
        self.flaws: list[Flaw] = []
        self._aliases = aliases
        self._models = models
        self._known = frozenset(models)
        self._folded = {name.casefold(): name for name in aliases}
        self._done: dict[str, Reach] = {}
        self._depth: dict[str, int] = {}
        """How many aliases in a row one begins, itself included; 1 when it is flawed, so that one flaw is told once."""
        self._named: set[frozenset[str]] = set()

    def reach(self, alias: Alias, path: tuple[str, ...]) -> Reach:
        if alias.name in self._done:
            return self._done[alias.name]
        path = (*path, alias.name)
        before = len(self.flaws)
        self._check(alias)
        reach: Reach = {}
        depth = 1
        for index, target in enumerate(alias.targets):
            for model, version in self._follow(alias, index, target, path).items():
                self._add(reach, model, version, alias)
            depth = max(depth, 1 + self._depth.get(target, 0))
        if len(self.flaws) > before:
            reach, depth = {}, 1
        self._done[alias.name] = reach
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
            self.flaws.append(_bad_version(("aliases", alias.name, "version"), alias.version))

    def _follow(self, alias: Alias, index: int, target: str, path: tuple[str, ...]) -> Reach:
        if target == EVERY_MODEL:
            return dict.fromkeys(self._models, alias.version)
        if target in self._known:
            return {target: alias.version}
        next_name = target if target in self._aliases else self._folded.get(target.casefold(), "")
        if next_name in path:
            self._name_cycle(alias, index, (*path[path.index(next_name) :], target))
            return {}
        if target not in self._aliases:
            self.flaws.append(_unknown(alias.place(index), target, [*self._models, *self._aliases]))
            return {}
        if len(path) + self._depth.get(target, 1) > LONGEST_CHAIN:
            chain = " -> ".join((*path, target))
            self.flaws.append(
                Flaw(alias.place(index), f"more than {LONGEST_CHAIN} aliases in a row: {chain}", "let the alias name the model itself")
            )
            return {}
        reach = self.reach(self._aliases[target], path)
        return {model: ",".join(filter(None, (version, alias.version))) for model, version in reach.items()}

    def _add(self, reach: Reach, model: str, version: str, alias: Alias) -> None:
        if reach.setdefault(model, version) != version:
            message = f"{alias.name!r} reaches {model!r} under two version constraints: {reach[model]!r} and {version!r}"
            self.flaws.append(Flaw(("aliases", alias.name), message, "keep one"))

    def _name_cycle(self, alias: Alias, index: int, cycle: tuple[str, ...]) -> None:
        members = frozenset(name.casefold() for name in cycle)
        if members not in self._named:
            self._named.add(members)
            self.flaws.append(
                Flaw(alias.place(index), f"aliases go round in a circle: {' -> '.join(cycle)}", "one of them must name a model")
            )


def _bad_version(place: Place, text: str) -> Flaw:
    return Flaw(place, f"{text!r} is not a version constraint", "write for example '>=2025.3,<2026', '~2025.3', '2025.3.*' or '2025.3.1'")


def _unknown(place: Place, name: str, known: Collection[str]) -> Flaw:
    hint = did_you_mean(name, known) or "a model is known when a pool serves it"
    return Flaw(place, f"{name!r} is neither a model that a pool serves nor an alias", hint, missing=("models", name))

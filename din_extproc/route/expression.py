"""Rule conditions in CEL, for what declarative conditions can't express: compiled once, checked against the known variables.

An expression that fails on a request, or whose result is not a boolean, does not match.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import cel
from msgspec import Struct

from din_extproc.domain.price import UNITS
from din_extproc.domain.request import Intent
from din_extproc.domain.tenant import Tenant


class Facts(Struct, frozen=True, gc=False):
    """The data available to a condition."""

    intent: Intent
    tenant: Tenant
    headers: Mapping[str, str]
    """Names in lower case."""
    hour_utc: int
    model: str
    """The requested name without its version constraint."""


Matches = Callable[[Facts], bool]

VARIABLES: dict[str, Callable[[Facts], Any]] = {
    "path": lambda facts: facts.intent.operation.value,
    "model": lambda facts: facts.model,
    "estimated_tokens": lambda facts: facts.intent.estimate.tokens,
    "output_tokens": lambda facts: facts.intent.output_tokens or 0,
    "timeout_ms": lambda facts: facts.intent.timeout_ms or 0,
    "budget_tokens": lambda facts: facts.intent.budget_tokens or 0,
    "budget_cost": lambda facts: (facts.intent.budget_cost or 0) / UNITS,
    "tenant": lambda facts: facts.tenant.id,
    "priority": lambda facts: facts.tenant.priority_of(facts.intent.priority).value,
    "task_tier": lambda facts: facts.intent.task_tier,
    "stream": lambda facts: facts.intent.stream,
    "headers": lambda facts: dict(facts.headers),
    "hour_utc": lambda facts: facts.hour_utc,
}
"""`estimated_tokens` covers the whole prompt, all inputs of a list together; `output_tokens` covers all answers, 0 if unspecified;
`timeout_ms` is the client's deadline, `budget_tokens` and `budget_cost` the most that it wants to spend: 0 if it does not say."""

_SAMPLE: dict[str, Any] = {
    "path": "/v1/chat/completions",
    "model": "m",
    "estimated_tokens": 1,
    "output_tokens": 1,
    "timeout_ms": 1,
    "budget_tokens": 1,
    "budget_cost": 1.0,
    "tenant": "t",
    "priority": "standard",
    "task_tier": "",
    "stream": False,
    "headers": {},
    "hour_utc": 0,
}
FUNCTIONS = ("size", "contains", "startsWith", "endsWith", "matches", "int", "uint", "double", "string")
"""In addition to operators and the macros `has`, `all`, `exists`, `exists_one`, `map` and `filter`."""

_FAULTS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
_BOUND_BY_MACRO = re.compile(r"\.\s*(?:all|exists|exists_one|map|filter)\s*\(\s*([A-Za-z_]\w*)\s*,")
_HEADERS_USE = re.compile(r"\bheaders\b")
_HEADERS_INDEX = re.compile(
    r"""\bheaders\s*\[\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\]|(?:"([^"\\]*)"|'([^'\\]*)')\s+in\s+headers\b(?!\s*[.\[])"""
)
_QUOTED = r"""[rR]?(?:"{3}[\s\S]*?"{3}|'{3}[\s\S]*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_PATTERN = re.compile(rf"//[^\n]*|\.\s*matches\s*\(\s*(?P<pattern>{_QUOTED})\s*\)|{_QUOTED}")
"""A literal pattern; comments and other strings are skipped."""
_INVALID_REGEX = "not a valid regex"
_POSITION = re.compile(r"<input>:(\d+):(\d+): (?:Syntax error: )?([^\n]*)")
_MAX_DETAIL = 120


class BadExpression(Struct, frozen=True, gc=False):
    """Why an expression is invalid. `line` and `column` count from 1 inside the expression; 0: the whole expression."""

    message: str
    line: int = 0
    column: int = 0
    unknown: str = ""
    """The name that is neither a variable nor a function."""


def compile_expression(source: str) -> Matches | BadExpression:
    """Compile an expression, or report a syntax error, an unknown name, a wrong type or a result that is not a boolean."""
    try:
        program = cel.compile(source)
    except ValueError as error:
        return _read_syntax_error(str(error))
    names = program.references()
    bound = set(_BOUND_BY_MACRO.findall(source))
    unknown = [name for name in names["variables"] if name not in VARIABLES and name not in bound]
    unknown += [name for name in names["functions"] if name.isidentifier() and name not in FUNCTIONS]
    if unknown:
        return _describe_unknown_name(source, unknown[0])
    flaw = _find_invalid_pattern(source)
    if flaw is not None:
        return flaw
    used = [name for name in names["variables"] if name in VARIABLES and name not in bound]
    try:
        result = program.execute({name: _SAMPLE[name] for name in used})
    except (ArithmeticError, LookupError, ValueError):
        result = False
    except (RuntimeError, TypeError) as error:
        if _INVALID_REGEX in str(error):
            return BadExpression(_describe_error(error))
        if isinstance(error, RuntimeError) and not str(error).startswith("Undefined"):
            result = False  # # a conversion may fail for the sample value only
        else:
            return BadExpression(f"the expression fails: {str(error)[:_MAX_DETAIL].split('.')[0]}")
    if not isinstance(result, bool):
        return BadExpression(f"the expression's result is not a boolean but of type {type(result).__name__}")
    return _build_matcher(program, {name: VARIABLES[name] for name in used}, _find_header_names(source))


def describe_failure(source: str, facts: Facts) -> str:
    """Return why a valid expression fails on a request; "" when its result is a boolean."""
    program = cel.compile(source)
    try:
        program.execute({name: VARIABLES[name](facts) for name in program.references()["variables"] if name in VARIABLES})
    except _FAULTS as error:
        return _describe_error(error)
    return ""


def _describe_error(error: BaseException) -> str:
    if isinstance(error, LookupError):
        return f"there is no {error}"
    text = str(error)
    if _INVALID_REGEX in text:
        pattern = text.partition(" error: ")[2].partition(_INVALID_REGEX)[0].strip()
        return f"{pattern} is not a pattern: {text.rpartition('error: ')[2].partition('. Check ')[0]}"
    return " ".join(text.partition(". Check ")[0].split())[:_MAX_DETAIL]


def _find_invalid_pattern(source: str) -> BadExpression | None:
    """Return the first invalid regex pattern: it would make its expression fail on every request."""
    for found in _PATTERN.finditer(source):
        if found["pattern"] is None:
            continue
        try:
            cel.evaluate(f"''.matches({found['pattern']})")
        except _FAULTS as error:
            before = source[: found.start("pattern")]
            return BadExpression(_describe_error(error), line=before.count("\n") + 1, column=len(before) - before.rfind("\n"))
    return None


def _build_matcher(program: cel.Program, read: dict[str, Callable[[Facts], Any]], named: tuple[str, ...] | None) -> Matches:
    """Return a matcher that passes only the used variables: each header costs some microseconds to convert to CEL."""
    if "headers" in read and named is not None:
        read = {**read, "headers": lambda facts: {name: facts.headers[name] for name in named if name in facts.headers}}
    readers = tuple(read.items())
    execute = program.execute

    def matches(facts: Facts) -> bool:
        try:
            return execute({name: value(facts) for name, value in readers}) is True
        except _FAULTS:
            return False

    return matches


def _find_header_names(source: str) -> tuple[str, ...] | None:
    """Return the names of the headers that an expression reads; None when its text does not determine them."""
    uses = _HEADERS_INDEX.findall(source)
    if len(uses) != len(_HEADERS_USE.findall(source)):
        return None
    return tuple(dict.fromkeys("".join(quoted) for quoted in uses))


def _read_syntax_error(text: str) -> BadExpression:
    found = _POSITION.search(text)
    if found is None:
        return BadExpression(text.splitlines()[0][:_MAX_DETAIL])
    detail = found[3].split(" expecting ")[0].replace("'<EOF>'", "end")
    return BadExpression(f"syntax error: {detail[:_MAX_DETAIL]}", line=int(found[1]), column=int(found[2]))


def _describe_unknown_name(source: str, name: str) -> BadExpression:
    at = next((found.start() for found in re.finditer(rf"\b{re.escape(name)}\b", source)), 0)
    before = source[:at]
    return BadExpression(
        f"{name!r} is neither a variable nor a function",
        line=before.count("\n") + 1,
        column=at - (before.rfind("\n") + 1) + 1,
        unknown=name,
    )

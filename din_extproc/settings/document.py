"""A YAML or JSON text as plain data, with the line of every value and the environment's variables put in.

Rule: whatever YAML would let pass in silence (a key given twice, a key that is no text, an unset variable) is a problem.

`${NAME}` inside a value is the environment's variable, `${NAME:-default}` has a default, `$${` is a literal `${`. An unquoted value is read
as YAML after the variables are in, so `${WORKERS:-2}` is a number and `"${WORKERS:-2}"` a text. Inside `{ }` and `[ ]` YAML wants the
quotes. Keys and JSON files take no variables.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from din_extproc.settings.problems import ConfigProblem, Place

_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(:-[^}]*)?\})?")
_TEXT = "tag:yaml.org,2002:str"
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "timestamp"))
_LARGEST = 500_000
"""Values in one file: anchors can multiply them."""
_SHORTEST_HIDDEN = 4
"""Characters: shorter values of variables may appear in messages, or every `1` would be hidden."""
_WORD = re.compile(rf"[A-Za-z0-9_-]{{{_SHORTEST_HIDDEN},}}")


class SourcePosition(NamedTuple):
    """A position in the text, counted from 1."""

    line: int
    column: int


class Document:
    """One file's data, where each value stands, and what is wrong so far."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.data: Any = None
        self.problems: list[ConfigProblem] = []
        self.values: dict[Place, SourcePosition] = {}
        self.keys: dict[Place, SourcePosition] = {}
        self._variables: dict[str, str] = {}
        self._from_variables: dict[Place, list[tuple[str, str]]] = {}
        self._settled: set[Place] = set()

    def report(self, place: Place, message: str, hint: str = "", *, at_key: bool = False, warning: bool = False) -> None:
        """Note a problem at the place, or at the nearest place above it that the file has.

        Nothing is added to a place whose text could not even be read. Values of variables are replaced by the variables' names.
        """
        if place in self._settled:
            return
        line, column = self._find_mark(place, at_key=at_key) or (None, None)
        message, hint = self._hide_variables(message, place), self._hide_variables(hint, place)
        self.problems.append(
            ConfigProblem(file=self.file, line=line, column=column, place=place, message=message, hint=hint, warning=warning)
        )

    def report_unreadable(self, place: Place, message: str, hint: str = "", *, at_key: bool = False) -> None:
        """Note that the text at the place says nothing: whatever else is found there follows from it."""
        self.report(place, message, hint, at_key=at_key)
        self._settled.add(place)

    def note_variable(self, place: Place, name: str, text: str) -> None:
        """Note that a value comes, at least in part, from the environment."""
        self._variables[text] = name
        self._from_variables.setdefault(place, []).append((name, text))

    def _hide_variables(self, message: str, place: Place) -> str:
        for text, name in self._variables.items():
            if len(text) >= _SHORTEST_HIDDEN:
                message = message.replace(text, f"${{{name}}}")
        for name, text in self._from_variables.get(place, ()):
            pieces = {word for word in _WORD.findall(message) if word in text and word != name}
            message = _WORD.sub(lambda word, hidden=pieces: "..." if word[0] in hidden else word[0], message)  # type: ignore[misc]
        return message

    def _find_mark(self, place: Place, *, at_key: bool) -> SourcePosition | None:
        if not at_key and place in self.values:
            return self.values[place]
        for length in range(len(place), 0, -1):
            found = self.keys.get(place[:length]) or self.values.get(place[:length])
            if found is not None:
                return found
        return None


def read_yaml(text: str, file: str, env: Mapping[str, str]) -> Document:
    """Parse a configuration file. Syntax errors end up in `problems`; then `data` is None."""
    document = Document(file)
    loader = yaml.CSafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            document.data = _YamlReader(document, loader, env).value(root, ())
    except yaml.MarkedYAMLError as error:
        document.problems.append(_make_syntax_problem(error, file, text))
    except yaml.YAMLError as error:
        document.problems.append(ConfigProblem(file=file, message=f"not YAML: {str(error).splitlines()[0]}"))
    except RecursionError:
        document.problems.append(ConfigProblem(file=file, message="nested too deeply"))
    finally:
        loader.dispose()
    return document


def read_json(text: str, file: str) -> Document:
    """Parse a JSON file, likewise."""
    document = Document(file)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        document.problems.append(ConfigProblem(file=file, line=error.lineno, column=error.colno, message=f"not JSON: {error.msg}"))
        return document
    except RecursionError:
        document.problems.append(ConfigProblem(file=file, message="nested too deeply"))
        return document
    # JSON is also YAML but for tabs: read a second time for the lines, and for keys given twice.
    marked = read_yaml(text.replace("\t", " "), file, {})
    document.values, document.keys = marked.values, marked.keys
    document.problems += [problem for problem in marked.problems if problem.place]
    document.data = data
    return document


class _YamlReader:
    """Turns YAML nodes into plain data."""

    def __init__(self, document: Document, loader: yaml.CSafeLoader, env: Mapping[str, str]) -> None:
        self._document = document
        self._loader = loader
        self._env = env
        self._count = 0
        self._open: set[int] = set()

    def value(self, node: yaml.Node, place: Place) -> Any:
        self._document.values[place] = SourcePosition(node.start_mark.line + 1, node.start_mark.column + 1)
        self._count += 1
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, place)
        if id(node) in self._open or self._count > _LARGEST:
            raise yaml.composer.ComposerError(None, None, "an anchor contains itself, or the file holds too much", node.start_mark)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*place, index)) for index, item in enumerate(node.value)]
            return self._read_mapping(node, place)
        finally:
            self._open.discard(id(node))

    def _read_mapping(self, node: yaml.Node, place: Place) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, inner = self._read_key(key_node, place)
            if key in data:
                first = self._document.keys[inner].line
                self._document.keys[inner] = SourcePosition(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
                self._document.report(inner, f"{key!r} is given twice, first on line {first}", "keep one of them", at_key=True)
                continue
            self._document.keys[inner] = SourcePosition(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            data[key] = self.value(value_node, inner)
        return data

    def _read_key(self, node: yaml.Node, place: Place) -> tuple[str, Place]:
        text = node.value if isinstance(node, yaml.ScalarNode) else str(node.tag)
        inner = (*place, text)
        if node.tag != _TEXT:
            self._document.keys[inner] = SourcePosition(node.start_mark.line + 1, node.start_mark.column + 1)
            merge = node.tag == "tag:yaml.org,2002:merge"
            hint = "merge keys are not supported; an anchor for a whole value is" if merge else f"put it in quotes: '{text}'"
            self._document.report_unreadable(inner, f"the key {text!r} is not a text", hint, at_key=True)
        return text, inner

    def _read_scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        text, tag = node.value, node.tag
        if "${" in text:
            text = self._replace_variables(text, place)
            if not node.style:
                tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        if tag == _TEXT:
            return text
        if tag not in _PLAIN_TAGS:
            self._document.report_unreadable(place, f"the YAML tag {tag.removeprefix('tag:yaml.org,2002:')!r} has no meaning here")
            return None
        try:
            return self._loader.construct_object(yaml.ScalarNode(tag, text, node.start_mark, node.end_mark))
        except (ValueError, yaml.YAMLError):
            self._document.report_unreadable(place, f"{text!r} is not a valid {tag.rpartition(':')[2]}")
            return None

    def _replace_variables(self, text: str, place: Place) -> str:
        def replaced(found: re.Match[str]) -> str:
            if found[0] == "$${":
                return "${"
            name, default = found[1], found[2]
            if name is None:
                self._document.report_unreadable(place, "`${` begins a variable: ${NAME} or ${NAME:-default}", "write $${ for a literal ${")
                return ""
            if name in self._env:
                self._document.note_variable(place, name, self._env[name])
                return self._env[name]
            if default is None:
                self._document.report_unreadable(
                    place, f"the environment has no variable {name}", f"set it, or give a default: ${{{name}:-default}}"
                )
                return ""
            return str(default[2:])

        return _VARIABLE.sub(replaced, text)


def _make_syntax_problem(error: yaml.MarkedYAMLError, file: str, text: str) -> ConfigProblem:
    mark = error.problem_mark or error.context_mark
    message = " ".join(filter(None, (error.problem, error.context))) or "not YAML"
    hint = ""
    if "start any token" in message:
        hint = "YAML indents with spaces, never with tabs; a text that begins with a special character stands in quotes"
    elif "mapping values are not allowed" in message:
        hint = "check the indentation of this line and the one above; a text with ': ' inside stands in quotes"
    elif mark and "${" in "".join(text.splitlines()[mark.line : mark.line + 1]):
        hint = "inside { } and [ ] a value with a variable stands in quotes"
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return ConfigProblem(file=file, line=line, column=column, message=f"not YAML: {message}", hint=hint)

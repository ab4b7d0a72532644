"""YAML as plain data: numbers and words as one writes them, no key twice, nothing that grows or runs when read."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from roadmatch.errors import RoadmatchError

MOST_BYTES = 65_536
MOST_DEPTH = 20

_TAG = "tag:yaml.org,2002:"
_NUMBERS = list("-+.0123456789")
# YAML 1.2's core schema: in YAML 1.1, which PyYAML reads, 1e-4 is a text, `no` is false, and 012 is ten. A whole
# number of more than 18 digits stays a text, since Python refuses to convert very long ones.
_PLAIN = (
    (f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    (f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    (f"{_TAG}int", re.compile(r"[-+]?[0-9]{1,18}\Z"), _NUMBERS),
    (f"{_TAG}float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?\Z"), _NUMBERS),
)


class YamlError(RoadmatchError):
    """Text that is no plain YAML."""


def load(text: str, name: str) -> Any:
    """None, booleans, numbers, texts, lists, and mappings with texts as keys. name: what errors call the text.

    Raises YamlError, which names the line, for more than MOST_BYTES or MOST_DEPTH levels, a key that comes twice, tags
    and references.
    """
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise YamlError(f"{name} is longer than {MOST_BYTES:,} bytes: a recipe is a page or two")
    try:
        _refuse_deep(text, name)
        return yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}" if mark else ""
        raise YamlError(f"{name}{where}: {' '.join(str(error.problem or error.context).split())}") from error
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, int(error.position)) + 1
        raise YamlError(f"{name} line {number}: the sign {chr(error.character)!r} is not taken: delete it") from error


def dump(data: object) -> str:
    """Text that `load` reads back to equal data, in the order of its keys."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read(path: Path) -> Any:
    """The same as `load`, of a UTF-8 file. Raises YamlError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        return load(data.decode("utf-8-sig"), str(path))
    except OSError as error:
        raise YamlError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise YamlError(f"{path} is not in UTF-8: save it as UTF-8") from error


def _refuse_deep(text: str, name: str) -> None:
    """Before anything is built, since building recurses and follows references."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        line = f"{name} line {event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(f"{line}: references (*{event.anchor}) are not taken: write it out, or use extends")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_DEPTH:
            raise YamlError(f"{line}: more than {MOST_DEPTH} levels")


class _Loader(yaml.SafeLoader):
    """Safe, and with numbers as YAML 1.2 has them."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # as the parent has it

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag != f"{_TAG}str":
                raise _problem("a key is a word", key)
            if key.value in seen:
                raise _problem(f"{key.value} comes twice: delete one", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what _Loader would take for a number."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # as the parent has it


def _problem(what: str, node: Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)


def _int(loader: _Loader, node: ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _float(loader: _Loader, node: ScalarNode) -> float:
    return float(loader.construct_scalar(node))


for _tag, _pattern, _first in _PLAIN:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor(f"{_TAG}int", _int)
_Loader.add_constructor(f"{_TAG}float", _float)

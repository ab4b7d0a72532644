"""What requests bring: names, forms and their limits."""

import json
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from roadmatch.gallery.galleries import Keep
from roadmatch.gallery.items import LONGEST_LABEL, MOST_IMAGES, UNSTORABLE

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
BATCH = 64
_METADATA_BYTES = 16_384

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
GalleryName = Annotated[str, Path(pattern=NAME_PATTERN, description="a gallery's name")]
ItemId = Annotated[str, Path(pattern=NAME_PATTERN, description="an item's id")]
ImageId = Annotated[str, Path(pattern=NAME_PATTERN, description="an image's id")]
Version = Annotated[
    str | None, Header(pattern=r'^"\d{1,18}-\d{1,18}"$', description="the ETag that the item must have")
]
IdempotencyKey = Annotated[
    str | None, Header(pattern=r"^[!-~]{1,128}$", description="a repeat with it changes nothing")
]

RuleName = Annotated[str | None, Field(max_length=64, description="an operating point of the bundle")]
Threshold = Annotated[
    float | None, Field(gt=-1, le=1, allow_inf_nan=False, description="on the score, in place of a rule")
]
TopK = Annotated[int, Field(ge=1, le=1000, description="items to show at most, matches and near misses together")]


class Form(BaseModel):
    """A form refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid")


class _Decides(Form):
    rule: RuleName = None
    threshold: Threshold = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "_Decides":
        if self.rule is not None and self.threshold is not None:
            raise ValueError("give a rule or a threshold, not both")
        return self


class SearchForm(_Decides):
    """A query."""

    image: UploadFile
    top_k: TopK = 10


class BatchForm(_Decides):
    """Several queries."""

    image: Annotated[list[UploadFile], Field(min_length=1, max_length=BATCH)]
    top_k: TopK = 10


class CompareForm(_Decides):
    """Two pictures: `query` is asked, `picture` is taken as a gallery's image."""

    query: UploadFile
    picture: UploadFile
    gallery: Annotated[Name | None, Field(description="decide as a search in this gallery does")] = None
    bundle: Annotated[str | None, Field(max_length=160, description="decide as in a gallery of one item")] = None

    @model_validator(mode="after")
    def _one_place(self) -> "CompareForm":
        if self.gallery is not None and self.bundle is not None:
            raise ValueError("give a gallery or a bundle, not both")
        return self


def _flat_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if len(value.encode("utf-8", "surrogatepass")) > _METADATA_BYTES:
        raise ValueError(f"metadata has more than {_METADATA_BYTES} bytes")
    try:
        return json.loads(value, parse_constant=_not_finite, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"metadata is no JSON: {error}") from error


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is not finite")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name comes twice")
    return fields


def _storable(value: str) -> str:
    if UNSTORABLE.search(value):
        raise ValueError("a text holds no NUL and no lone surrogate")
    return value


_Text = Annotated[str, AfterValidator(_storable)]
_Scalar = Annotated[float, Field(allow_inf_nan=False)] | int | bool | _Text | None
MetadataField = Annotated[
    dict[Annotated[_Text, Field(min_length=1, max_length=64)], _Scalar],
    BeforeValidator(_flat_json),
    Field(max_length=64, description="a flat JSON object of texts, finite numbers, true, false and null"),
]
Pictures = Annotated[list[UploadFile], Field(min_length=1, max_length=MOST_IMAGES, description="1 to 100 pictures")]


class ItemForm(Form):
    """An item as a whole."""

    image: Pictures
    label: Annotated[
        _Text | None, Field(max_length=LONGEST_LABEL, description="items of one label are the same thing")
    ] = None
    metadata: MetadataField = {}


class ImagesForm(Form):
    """More pictures of an item."""

    image: Pictures


class NewGallery(Form):
    """A gallery to be made."""

    name: Name
    bundle: Annotated[str | None, Field(max_length=160, description="its id; null: the service's default")] = None
    rule: Annotated[str | None, Field(max_length=64, description="default of its searches; null: the bundle's")] = None
    keep: Annotated[Keep, Field(description="whether uploaded bytes are kept")] = Keep.ORIGINAL


class GalleryChange(Form):
    """What of a gallery can be changed."""

    rule: Annotated[str | None, Field(max_length=64)] = None
    keep: Keep | None = None


async def _refuse_unknown_query(request: Request) -> None:
    """A query parameter that the route does not know, or that comes twice; the framework would drop it."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            raise invalid(name, "is no query parameter of this address", "query")
        if names.count(name) > 1:
            raise invalid(name, "comes twice", "query")


async def _refuse_repeats(request: Request) -> None:
    """A form field that stands for one value and comes twice is refused; the framework would take the last."""
    form = await request.form()
    names = [name for name, _ in form.multi_items()]
    for name in set(names):
        if names.count(name) > 1 and name != "image":
            raise invalid(name, "comes twice")


async def _refuse_second_image(request: Request) -> None:
    await _refuse_repeats(request)
    form = await request.form()
    if len(form.getlist("image")) > 1:
        raise invalid("image", "comes twice: send one picture, or use search-batch")


def invalid(name: str, message: str, part: str = "body") -> RequestValidationError:
    """What refuses a part of a request by its name."""
    return RequestValidationError([{"loc": (part, name), "msg": message, "type": "value_error", "input": None}])


KNOWN_QUERY = Depends(_refuse_unknown_query)
NO_REPEATS = Depends(_refuse_repeats)
ONE_IMAGE = Depends(_refuse_second_image)

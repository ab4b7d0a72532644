"""What the gallery is asked, and what the answer should be."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.verdict import Verdict
from demo.photographs import Photograph
from training.default_bundle.copies import EDITS

AS_IT_IS = "as it is"
_MOST = 400
"""Questions, about: with many photographs each is asked with fewer edits, which in turn come equally often."""


@dataclass(frozen=True)
class Question:
    """A picture to ask with. item: the id that is right, None where the photograph is not in the gallery."""

    photograph: str
    edit: str
    data: bytes
    item: str | None


@dataclass(frozen=True)
class Asked:
    """A question with its verdict."""

    question: Question
    verdict: Verdict

    @property
    def wrong(self) -> str:
        """`false match`, `missed`, or nothing; the wrong item for a photograph that is there counts as missed."""
        found = self.verdict.matches[0].item if self.verdict.matches else None
        if found == self.question.item:
            return ""
        return "missed" if self.question.item is not None else "false match"


def edits_each(photographs: int) -> int:
    """Edits by which each photograph is asked."""
    return min(len(EDITS), max(1, _MOST // photographs))


def questions(inside: Sequence[Photograph], outside: Sequence[Photograph]) -> list[Question]:
    """Copies of the photographs in the gallery, then the others, as they are and as copies.

    A photograph in the gallery is not asked as it is: that it finds itself shows nothing.
    """
    each = edits_each(len(inside) + len(outside))
    asked = []
    for number, photograph in enumerate([*inside, *outside]):
        item = photograph.id if number < len(inside) else None
        if item is None:
            asked.append(Question(photograph.id, AS_IT_IS, photograph.file.read_bytes(), None))
        for step in range(each):
            edit = list(EDITS)[(number * each + step) % len(EDITS)]
            asked.append(Question(photograph.id, edit, photograph.copies[edit], item))
    return asked

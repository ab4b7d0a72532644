import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "losses-and-metrics.md").read_text()


def test_the_snippets_of_the_page_on_losses_run_from_top_to_bottom() -> None:
    names: dict[str, object] = {}
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 5
    for snippet in snippets:
        exec(compile(snippet, "losses-and-metrics.md", "exec"), names)


@pytest.mark.parametrize("name", re.findall(r"`ready\.(\w+)`", PAGE))
def test_the_ready_losses_that_the_page_names_are_there(name: str) -> None:
    from roadmatch.losses import ready

    assert callable(getattr(ready, name))

"""training.data.manifest: lists of images as CSV and Parquet, and what they say."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.manifest import DataError, Manifest, Row, Split, of_rows, read, write

# Texts that a CSV has to quote, and none that a manifest refuses.
texts = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\\"), max_size=8)
names = texts.map(lambda text: "d/" + text.replace("/", "_") + ".jpg")
rows = st.builds(Row, names, texts, st.sampled_from(Split), st.booleans(), st.booleans(), texts)
row_lists = st.lists(rows, min_size=1, max_size=8, unique_by=lambda row: row.path)


def manifest(*listed: Row, root: Path = Path("/data")) -> Manifest:
    return of_rows(root, listed, lambda n: f"row {n}")


def csv_file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "images.csv").write_text(text, encoding="utf-8")
    return tmp_path / "images.csv"


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as refused:
        read(path, path.parent)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def values(given: Manifest) -> list[object]:
    columns = (given.paths, given.labels, given.splits, given.is_query, given.is_gallery, given.categories)
    return [given.root, *(list(column) for column in columns)]


@settings(max_examples=60, deadline=None)
@given(row_lists)
def test_a_manifest_is_the_same_after_a_csv_and_after_a_parquet_file(
    tmp_path_factory: pytest.TempPathFactory, listed: list[Row]
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    original = manifest(*listed)
    for path in (folder / "images.csv", folder / "images.parquet"):
        write(original, path)
        assert values(read(path, Path("/data"))) == values(original)
        assert read(path, Path("/elsewhere")).digest == original.digest
        assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_path_and_label_are_enough_and_the_rest_is_filled_in(tmp_path: Path) -> None:
    given = read(csv_file(tmp_path, "path,label\n./a//1.jpg,a\nb.jpg,\n"), tmp_path)
    assert given.paths == ("a/1.jpg", "b.jpg")
    assert given.labels == ("a", "")
    assert set(given.splits) == {Split.TRAIN}
    assert given.is_query.all()
    assert given.is_gallery.all()
    assert given.file(0) == tmp_path / "a" / "1.jpg"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column path"),
        ("path\na.jpg\n", "no column label"),
        ("path,label\n", "lists no images"),
        ("path,label,catgory\na.jpg,a,x\n", "'catgory' is no column of a manifest: did you mean category?"),
        ("path,label,width\na.jpg,a,3\n", "'width' is no column of a manifest: there are path"),
        ("path,label,label\na.jpg,a,a\n", "a column comes twice"),
        ("path,label\na.jpg,a\nb.jpg\n", "line 3: 1 cells, and the header has 2"),
        ("path,label,split\na.jpg,a,val\n", "line 2: split is 'val': train, validation, test"),
        ("path,label,is_query\na.jpg,a,maybe\n", "line 2: is_query is 'maybe': true or false"),
        ("path,label\na.jpg,a\nb.jpg,b\na.jpg,b\n", "line 4: a.jpg is there already ("),
        ("path,label\n/etc/a.jpg,a\n", "line 2: path is '/etc/a.jpg': it has to be relative"),
        ("path,label\nb/../../a.jpg,a\n", "it has to be relative"),
        ("path,label\nb\\a.jpg,a\n", "write / between folders"),
        ("path,label\n,a\n", "line 2: path is empty"),
        ('path,label\n"a\nb.jpg",a\n', "control signs"),
        ('path,label\n"a.jpg,a\n', "line 2: unexpected end of data"),
    ],
)
def test_a_list_that_is_wrong_names_its_line_and_the_mend(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(csv_file(tmp_path, text))


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_bytes("path,label\nä.jpg,a\n".encode("latin-1"))
    assert "not in UTF-8" in refusal(tmp_path / "images.csv")
    (tmp_path / "images.parquet").write_bytes(b"path,label\na.jpg,a\n")
    assert "images.parquet cannot be read" in refusal(tmp_path / "images.parquet")
    assert "cannot be read: [Errno 2]" in refusal(tmp_path / "none.csv")


def test_parquet_labels_may_be_whole_numbers_or_missing_and_not_fractions(tmp_path: Path) -> None:
    path = tmp_path / "images.parquet"
    pq.write_table(pa.table({"path": ["a.jpg", "b.jpg"], "label": [7, None], "is_query": [True, False]}), path)
    given = read(path, tmp_path)
    assert given.labels == ("7", "")
    assert given.is_query.tolist() == [True, False]
    pq.write_table(pa.table({"path": ["a.jpg", "b.jpg"], "label": [1.0, 2.5]}), path)
    assert "row 1: label is 1.0" in refusal(path)


def test_numbers_follow_the_sorted_labels_and_every_distractor_has_its_own() -> None:
    given = manifest(*(Row(f"{n}.jpg", label) for n, label in enumerate(["b", "", "a", "b", ""])))
    assert given.classes == ("a", "b")
    assert given.numbers.tolist() == [1, -1, 0, 1, -2]
    with pytest.raises(ValueError, match="read-only"):
        given.numbers[0] = 3


def test_the_digest_changes_with_every_value_and_with_the_order() -> None:
    first, second = Row("a.jpg", "a"), Row("b.jpg", "b")
    others = [
        (second, first),
        (first,),
        (Row("c.jpg", "a"), second),
        (Row("a.jpg", "c"), second),
        (Row("a.jpg", "a", Split.TEST), second),
        (Row("a.jpg", "a", is_query=False), second),
        (Row("a.jpg", "a", is_gallery=False), second),
        (Row("a.jpg", "a", category="x"), second),
    ]
    digests = {manifest(*listed).digest for listed in [(first, second), *others]}
    assert len(digests) == 1 + len(others)


def test_a_split_without_a_gallery_is_searched_in_that_of_the_others() -> None:
    given = manifest(
        Row("t.jpg", "a"),
        Row("v.jpg", "a", Split.VALIDATION, is_gallery=False),
        Row("q.jpg", "b", Split.TEST, is_gallery=False),
        Row("g.jpg", "b", Split.TEST, is_query=False),
    )
    assert given.queries(Split.VALIDATION).tolist() == [1]
    assert given.gallery(Split.VALIDATION).tolist() == [0, 3]
    assert given.queries(Split.TEST).tolist() == [2]
    assert given.gallery(Split.TEST).tolist() == [3]
    assert given.only(Split.TEST).paths == ("q.jpg", "g.jpg")


def test_a_disk_without_room_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text("old")
    with pytest.raises(DataError, match="cannot be written"):
        write(manifest(Row("a.jpg", "a")), tmp_path / "no folder" / "images.csv")
    (tmp_path / "images.parquet").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write(manifest(Row("a.jpg", "a")), tmp_path / "images.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.csv", "images.parquet"]
    assert (tmp_path / "images.csv").read_text() == "old"


def test_columns_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="the same number is needed"):
        Manifest(Path("/data"), ("a.jpg",), (), (), np.zeros(1, bool), np.zeros(1, bool), ("",))

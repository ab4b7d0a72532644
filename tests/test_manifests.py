"""roadmatch.jobs.manifests: CSV and JSON lines that name pictures, and lists of ids.

The manifests C70 to C82 are those of the project's list of bad inputs. Its 422 for a manifest as a whole is a
SourceError here, and "row failed" a Failure in the row's place or EntryFailed when it is read. Its cells that a
spreadsheet would run are texts like any other, and an item's id is none of them.
"""

import json
import time
import tracemalloc
from pathlib import Path

import pytest

from roadmatch.jobs.queue import Failure
from roadmatch.jobs.sources import Entry, EntryFailed, Places, SourceError, counted, entries

HEADER = b"id,path\n"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """An allowed folder with two pictures, and URLs off."""
    (tmp_path / "uploads").mkdir()
    (tmp_path / "shop").mkdir()
    for name in ("good.jpg", "good.png"):
        (tmp_path / "shop" / name).write_bytes(name.encode())
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    return Places(tmp_path / "uploads", (tmp_path / "shop",))


def listed(places: Places, data: bytes, kind: str = "csv", start: int = 0) -> list[Entry | Failure]:
    (places.uploads / "rows").write_bytes(data)
    with entries({"kind": kind, "upload": "rows"}, places, start) as found:
        return list(found)


def outcomes(places: Places, data: bytes, kind: str = "csv") -> list[tuple[str, bytes | str]]:
    """Name of each entry, and its bytes or the code of its failure."""
    found = listed(places, data, kind)
    assert counted({"kind": kind, "upload": "rows"}, places) == len(found)
    assert [one.position for one in found] == list(range(len(found)))
    return [(one.name, one.code if isinstance(one, Failure) else read(one)) for one in found]


def read(one: Entry) -> bytes | str:
    try:
        return one.read()
    except EntryFailed as error:
        return error.code if "/" not in error.detail else "it tells a path of the server"


def refusal(places: Places, data: bytes, kind: str = "csv") -> str:
    with pytest.raises(SourceError) as refused:
        listed(places, data, kind)
    with pytest.raises(SourceError):
        counted({"kind": kind, "upload": "rows"}, places)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + HEADER + b"a1,good.jpg\n",  # C70
        b"id,path\r\na1,good.jpg\r\n",  # C71
        b" ID , Path \na1,good.jpg",
        b'"id","path"\n"a1","good.jpg"\n\n\n',
        b"id,path,url,label,metadata\na1,good.jpg,,,\n",
        b"\xef\xbb\xbf" + b'{"id": "a1", "path": "good.jpg"}\r\n\n',
        b'{"id": "a1", "path": "good.jpg", "url": null, "label": null, "metadata": {}}',
    ],
)
def test_a_mark_at_the_start_line_ends_and_empty_lines_mean_nothing(places: Places, data: bytes) -> None:
    (one,) = listed(places, data, "jsonl" if b"{" in data[:4] else "csv")
    assert isinstance(one, Entry)
    assert (one.item_id, one.label, one.metadata, one.read()) == ("a1", None, {}, b"good.jpg")


@pytest.mark.parametrize("row", [b'a1,good.jpg,Robin,"{""year"": 1950, ""sold"": true}"', None])
def test_label_and_metadata_come_from_their_columns(places: Places, row: bytes | None) -> None:
    fields = {"id": "a1", "path": "good.jpg", "label": "Robin", "metadata": {"year": 1950, "sold": True}}
    data = json.dumps(fields).encode() if row is None else b"id,path,label,metadata\n" + row
    (one,) = listed(places, data, "jsonl" if row is None else "csv")
    assert isinstance(one, Entry)
    assert (one.label, one.metadata) == ("Robin", {"year": 1950, "sold": True})


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (HEADER + "café,good.jpg\n".encode("latin-1"), 2),  # C72
        ((HEADER + b"a1,good.jpg\n").decode().encode("utf-16"), 1),  # C73
        (HEADER + b"a1,good.jpg\n" * 999 + b"\xff,x\n", 1001),
    ],
)
def test_another_encoding_is_refused_by_line_and_name(places: Places, data: bytes, line: int) -> None:
    assert refusal(places, data) == f"line {line} is not in the encoding UTF-8: save the manifest as UTF-8"


def test_utf_16_without_a_mark_has_no_header(places: Places) -> None:
    assert "no header" in refusal(places, (HEADER + b"a1,good.jpg\n").decode().encode("utf-16-le"))


def test_a_second_row_with_an_id_fails_and_names_the_first(places: Places) -> None:  # C74
    first, second = listed(places, HEADER + b"a1,good.jpg\na1,good.png\n")
    assert isinstance(first, Entry)
    assert isinstance(second, Failure)
    assert (second.name, second.code) == ("line 3: good.png", "duplicate-id")
    assert second.detail == "id a1 came before, at line 2: good.jpg: an id comes once"
    (resumed,) = listed(places, HEADER + b"a1,good.jpg\na1,good.png\n", start=1)
    assert resumed == second


def test_cells_that_a_spreadsheet_would_run_are_texts_and_no_ids(places: Places) -> None:  # C75
    cells = ["=cmd|'/c calc'!A1", "+1", "@x", "-2"]
    data = "id,path,label\n" + "".join(f"a{number},good.jpg,{cell}\n" for number, cell in enumerate(cells))
    assert [one.label for one in listed(places, data.encode()) if isinstance(one, Entry)] == cells
    as_ids = HEADER + "".join(f"{cell},good.jpg\n" for cell in cells).encode()
    assert {code for _, code in outcomes(places, as_ids)} == {"invalid-item"}


def test_rows_that_are_none_fail_and_the_rest_goes_in(places: Places) -> None:  # C76 to C78
    rows = [b"a1", b"a2,good.jpg,extra,extra", b"", b",good.jpg", b"a3,", b"a\0b,good.jpg", b"a4,go\0od.jpg"]
    rows += [b"a5," + b"x" * 200_000, b'"a6"x,good.jpg', b"a7," + b"x," * 2_000_000, b"a8,good.jpg"]
    found = outcomes(places, HEADER + b"\n".join(rows))
    assert [code for _, code in found] == ["invalid-row"] * 9 + [b"good.jpg"]
    assert [name.partition(":")[0] for name, _ in found] == [
        f"line {line}" for line in (2, 3, 5, 6, 7, 8, 9, 10, 11, 12)
    ]


def test_a_row_of_several_lines_is_named_by_its_first(places: Places) -> None:
    data = b'id,path,label\na1,good.jpg,"two\nlines"\na2,nowhere.jpg,\n'
    assert outcomes(places, data) == [("line 2: good.jpg", b"good.jpg"), ("line 4: nowhere.jpg", "file-missing")]
    broken = data.replace(b'lines"', b'lines"x')
    assert outcomes(places, broken) == [("line 2", "invalid-row"), ("line 4: nowhere.jpg", "file-missing")]


def test_metadata_that_are_no_json_are_said_to_be_that(places: Places) -> None:
    (one,) = listed(places, b"id,path,metadata\na1,good.jpg,red\n")
    assert isinstance(one, Failure)
    assert one.detail == 'metadata is no JSON object, such as {"price": 12}: Expecting value'


@pytest.mark.parametrize(
    ("path", "code"),
    [
        *(("../secret.jpg", "unsafe-path"), ("/etc/passwd", "unsafe-path"), ("/etc/nowhere", "unsafe-path")),  # C79
        *(("file:///etc/passwd", "unsafe-path"), ("http://169.254.169.254/latest", "unsafe-path")),
        *(("C:\\good.jpg", "unsafe-path"), ("..\\secret.jpg", "unsafe-path"), ("a/../../secret.jpg", "unsafe-path")),
        *(
            ("link.jpg", "unsafe-path"),
            ("{root}/secret.jpg", "unsafe-path"),
            ("{root}/shop/../secret.jpg", "unsafe-path"),
        ),
        *(("{root}/shopping/x.jpg", "unsafe-path"), ("//etc/passwd", "unsafe-path"), ("/", "unsafe-path")),
        *(
            ("nowhere.jpg", "file-missing"),
            ("good.jpg/x", "file-missing"),
            (".", "unsafe-path"),
            ("x" * 300, "unreadable-file"),
        ),
        *(("{root}/shop/good.jpg", b"good.jpg"), ("./good.jpg", b"good.jpg"), ("{root}/shop/nowhere", "file-missing")),
    ],
)
def test_a_path_stays_inside_the_allowed_folders(places: Places, path: str, code: str | bytes) -> None:
    root = places.uploads.parent
    (root / "shop/link.jpg").symlink_to(root / "secret.jpg")
    row = json.dumps({"id": "a", "path": path.replace("{root}", str(root))}).encode()
    assert [code for _, code in outcomes(places, row, "jsonl")] == [code]


def test_a_path_is_looked_for_in_each_allowed_folder(places: Places, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more/b.jpg").write_bytes(b"b")
    both = Places(places.uploads, (*places.folders, tmp_path / "more"))
    assert [found for _, found in outcomes(both, HEADER + b"a,good.jpg\nb,b.jpg\n")] == [b"good.jpg", b"b"]


def test_what_is_off_names_the_setting_that_turns_it_on(places: Places) -> None:
    (one,) = listed(places, b"id,url\na,https://example.com/a.jpg\n")
    (two,) = listed(Places(places.uploads), HEADER + b"a,good.jpg\n")
    for entry, code, setting in ((one, "urls-off", "IMPORT_HOSTS"), (two, "folders-off", "IMPORT_FOLDERS")):
        assert isinstance(entry, Entry)
        with pytest.raises(EntryFailed, match=setting) as failed:
            entry.read()
        assert failed.value.code == code


def test_a_url_is_fetched_when_its_entry_is_read(places: Places) -> None:
    asked = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        if "bad" in url:
            raise EntryFailed("url-not-fetched", "it gave no picture")
        return b"picture"

    on = Places(places.uploads, places.folders, fetch)
    found = listed(
        on, b"id,url,path\na,https://x.com/good.jpg,\nb,https://x.com/bad.jpg,\nc,,good.jpg\nd,https://x.com/,y\n"
    )
    assert asked == []
    assert [read(one) if isinstance(one, Entry) else one.code for one in found] == [
        b"picture",
        "url-not-fetched",
        b"good.jpg",
        "invalid-row",
    ]
    assert asked == ["https://x.com/good.jpg", "https://x.com/bad.jpg"]


@pytest.mark.parametrize(
    "data",
    [
        *(b"a1,good.jpg\n", b"", b"\n", b"\xef\xbb\xbf", b"id\na1\n", b"path\ngood.jpg\n"),  # C80, C82
        *(b"id;path\na;b\n", b"id,path,colour\n", b"id,path,id\n", b'"id,path\na,b\n', b"i" * 2_000_000),
    ],
)
def test_a_manifest_without_its_header_is_refused(places: Places, data: bytes) -> None:
    assert "line 1 names the columns" in refusal(places, data)


@pytest.mark.parametrize("more", [b"x\n" * 500, b"", b"x\n" * 100_000, b"x" * 50 + b"\n" * 200_000])
def test_a_quote_that_is_not_closed_is_refused_by_its_line(places: Places, more: bytes) -> None:  # C81
    data = HEADER + b'a0,good.jpg\na1,"good.jpg\n' + more
    assert refusal(places, data) == "line 3: a quote is opened and not closed: close it"


@pytest.mark.parametrize(
    "row",
    [
        *('{"id": "a"}', '["a", "good.jpg"]', "{", "null", '{"id": "a", "path": "good.jpg", "size": 3}', "[" * 100_000),
        *(
            '{"id": 7, "path": "good.jpg"}',
            '{"id": "a", "path": ["good.jpg"]}',
            '{"id": "a", "path": "good.jpg", "label": 5}',
        ),
        *('{"id": "a", "id": "b", "path": "good.jpg"}', '{"id": "a", "path": "good.jpg", "metadata": {"a": NaN}}'),
        *('{"id": "a", "path": "good.jpg", "metadata": [1]}', '{"id": "a\\u0000", "path": "good.jpg"}', "9" * 5000),
        '{"id": "a", "path": "good.jpg", "metadata": {"a": "' + "x" * 20_000 + '"}}',
        '{"id": "a", "path": "good.jpg", "metadata": ' + json.dumps({str(number): 1 for number in range(65)}) + "}",
        '{"id": "a", "path": "' + "x" * 2_000_000 + '"}',
    ],
)
def test_a_line_that_is_no_row_fails_and_the_next_goes_in(places: Places, row: str) -> None:
    good = '{"id": "z", "path": "good.jpg"}'
    assert [code for _, code in outcomes(places, f"{row}\n{good}\n".encode(), "jsonl")] == ["invalid-row", b"good.jpg"]


@pytest.mark.parametrize(
    "fields",
    [
        *({"id": "../a"}, {"id": "a b"}, {"id": "x" * 129}, {"label": "x" * 257}, {"metadata": {"a": [1]}}),
        *({"metadata": {"a": {"b": 1}}}, {"label": "\ud800"}, {"metadata": {"a\0": 1}}, {"metadata": {"a": 1e999}}),
    ],
)
def test_a_row_that_no_item_can_be_fails(places: Places, fields: dict[str, object]) -> None:
    row = json.dumps({"id": "a", "path": "good.jpg", **fields}).replace("Infinity", "1e999")
    assert [code for _, code in outcomes(places, row.encode(), "jsonl")] == ["invalid-item"]


def test_an_empty_list_of_json_lines_is_refused(places: Places) -> None:
    assert "empty" in refusal(places, b"", "jsonl")


def test_names_of_rows_are_one_printable_line(places: Places) -> None:
    row = json.dumps({"id": "a", "path": "a\n\u202eb" + "x" * 400}).encode()
    ((name, _),) = outcomes(places, row, "jsonl")
    assert name.isprintable()
    assert len(name) < 230


def test_a_long_manifest_is_read_in_little_memory(places: Places) -> None:
    with (places.uploads / "rows").open("wb") as file:
        file.write(HEADER)
        file.writelines(b"item-%d,nowhere/%d.jpg\n" % (number, number) for number in range(20_000))
    start = time.monotonic()
    tracemalloc.start()
    with entries({"kind": "csv", "upload": "rows"}, places, 19_990) as found:
        assert [one.position for one in found] == list(range(19_990, 20_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert time.monotonic() - start < 20


# --- ids of a deletion


@pytest.mark.parametrize("source", [{"ids": ["a", "b", "a", "../x"]}, {"upload": "rows"}])
def test_ids_come_from_a_list_or_an_upload(places: Places, source: dict[str, object]) -> None:
    (places.uploads / "rows").write_bytes(b"a\r\nb\n\na\n../x\n")
    with entries({"kind": "ids", **source}, places) as found:
        one, two, *rest = list(found)
    assert isinstance(one, Entry)
    assert isinstance(two, Entry)
    assert (one.item_id, two.item_id) == ("a", "b")
    assert [failure.code for failure in rest if isinstance(failure, Failure)] == ["duplicate-id", "invalid-item"]
    assert counted({"kind": "ids", **source}, places) == 4
    assert read(one) == "no-picture"


def test_what_a_url_holds_of_secrets_is_not_shown(places: Places) -> None:
    data = b"id,url\na,https://me:secret@example.com/x/a.jpg?token=secret#secret\n"
    data += b"b,https://example.com/b?.jpg\n"
    assert [name for name, _ in outcomes(places, data)] == [
        "line 2: https://example.com/x/a.jpg",
        "line 3: https://example.com/b",
    ]
    assert outcomes(places, b"id,path\na,what?.jpg\n")[0][0] == "line 2: what?.jpg"

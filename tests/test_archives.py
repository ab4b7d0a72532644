"""roadmatch.jobs.archives and zips: pictures out of zips and tars, the hostile ones among them.

The archives C50 to C61 are those of the project's list of bad inputs. Its 413 and 422 for an archive as a whole are a
SourceError here; a "member failed" is a Failure in the member's place, or EntryFailed when it is read, and its good
members are read.
"""

import gc
import gzip
import io
import random
import stat
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import pytest

from roadmatch.errors import UnreadableImage
from roadmatch.images import Limits
from roadmatch.jobs import archives, entry, zips
from roadmatch.jobs.queue import Failure
from roadmatch.jobs.sources import Entry, EntryFailed, Places, SourceError, counted, entries
from tests.hostile_pictures import encoded, photo

JPEG = encoded(photo(), "JPEG", quality=90)
PNG = encoded(photo(), "PNG")
ZIP, TAR = {"kind": "zip", "upload": "upload"}, {"kind": "tar", "upload": "upload"}


@dataclass(frozen=True)
class Answer:
    """code: of the failure, None where the picture was read."""

    position: int
    name: str
    item_id: str | None
    label: str | None
    code: str | None
    data: bytes | None


def answers(tmp_path: Path, data: bytes, source: Mapping[str, str], start: int = 0) -> list[Answer]:
    """What comes of an archive, each entry read in its turn."""
    (tmp_path / "upload").write_bytes(data)
    with entries(source, Places(tmp_path), start) as found:
        return [answer(one) for one in found]


def answer(one: Entry | Failure) -> Answer:
    if isinstance(one, Failure):
        return Answer(one.position, one.name, None, None, one.code, None)
    try:
        return Answer(one.position, one.name, one.item_id, one.label, None, one.read())
    except EntryFailed as error:
        return Answer(one.position, one.name, one.item_id, one.label, error.code, None)


def codes(tmp_path: Path, data: bytes, source: Mapping[str, str]) -> dict[str, str | None]:
    """Name -> code of its failure, None for a picture that was read as it was packed."""
    found = answers(tmp_path, data, source)
    assert all(one.data in (JPEG, PNG) for one in found if one.code is None)
    return {one.name: one.code for one in found}


def refusal(tmp_path: Path, data: bytes, source: Mapping[str, str]) -> str:
    with pytest.raises(SourceError) as refused:
        answers(tmp_path, data, source)
    assert str(tmp_path) not in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def zipped(members: Sequence[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, data in members:
            doubled = name in archive.namelist()
            with pytest.warns(UserWarning, match="Duplicate name") if doubled else nullcontext():
                archive.writestr(name, data)
    return target.getvalue()


def tarred(members: Sequence[tuple[str, bytes, bytes]], mode: str = "w:gz", form: int = tarfile.PAX_FORMAT) -> bytes:
    """name, type, contents; a link leads to /etc/passwd."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode, format=form) as archive:  # type: ignore[call-overload]
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(data)
            member.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


def shaped(data: bytes, **changes: int) -> bytes:
    """A zip of one member whose directory says other things of it."""
    places = {"flags": (8, "<H"), "method": (10, "<H"), "packed": (20, "<L"), "size": (24, "<L"), "offset": (42, "<L")}
    changed, record = bytearray(data), data.rindex(b"PK\1\2")
    for name, value in changes.items():
        place, form = places[name]
        struct.pack_into(form, changed, record + place, value)
    return bytes(changed)


def overlapped(count: int) -> bytes:
    """A zip whose directory names one member so many times."""
    one = zipped([("a.jpg", bytes(5_000_000))])
    record, end = one.rindex(b"PK\1\2"), one.rindex(b"PK\5\6")
    listed = one[record:end] * count
    return one[:record] + listed + one[end : end + 8] + struct.pack("<HHIIH", count, count, len(listed), record, 0)


# --- zip


def test_paths_that_lead_out_fail_and_the_others_go_in(tmp_path: Path) -> None:  # C50
    bad = ["../../slip.jpg", "/abs.jpg", "a/../../b.jpg", "C:\\w.jpg", "..\\win.jpg"]
    found = codes(tmp_path, zipped([("good.jpg", JPEG), *((name, JPEG) for name in bad)]), ZIP)
    assert found == {"good.jpg": None, **dict.fromkeys(bad, "unsafe-path")}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["upload"]


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_a_link_or_device_in_a_zip_fails(tmp_path: Path, kind: int) -> None:  # C51
    link = zipfile.ZipInfo("link.jpg")
    link.external_attr = (kind | 0o777) << 16
    found = codes(tmp_path, zipped([(link, b"/etc/passwd"), ("good.jpg", JPEG)]), ZIP)
    assert found == {"link.jpg": "not-a-file", "good.jpg": None}


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:  # C52
    bomb = zipped([(f"{number}.jpg", bytes(20 << 20)) for number in range(10)])
    start = time.monotonic()
    assert "unpacks to over" in refusal(tmp_path, bomb, ZIP)
    assert time.monotonic() - start < 1


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:  # C53
    assert "share their bytes" in refusal(tmp_path, overlapped(1000), ZIP)
    assert "share their bytes" in refusal(tmp_path, overlapped(2), ZIP)


@pytest.mark.parametrize("changes", [{"size": 10}, {"size": 5_000_001}, {"size": 0}, {"packed": 100}])
def test_a_member_that_is_not_what_the_directory_says_fails(tmp_path: Path, changes: dict[str, int]) -> None:  # C54
    liar = shaped(zipped([("a.jpg", bytes(5_000_000))]), **changes)
    assert [one.code for one in answers(tmp_path, liar, ZIP)] == ["broken-member"]


def test_a_member_over_20_mb_fails_unread(tmp_path: Path) -> None:
    noise = random.Random(3).randbytes(Limits().bytes + 1)
    found = answers(tmp_path, zipped([("a.jpg", noise), ("b.jpg", noise[:-1])], zipfile.ZIP_STORED), ZIP)
    assert [one.code for one in found] == ["image-too-large", None]
    assert [len(one.data or b"") for one in found] == [0, Limits().bytes]


def test_an_archive_inside_an_archive_is_not_opened(tmp_path: Path) -> None:  # C55
    names = ["inner.zip", "inner.tar.gz", "INNER.RAR"]
    found = codes(tmp_path, zipped([*((name, zipped([("a.jpg", JPEG)])) for name in names), ("good.jpg", JPEG)]), ZIP)
    assert found == {**dict.fromkeys(names, "nested-archive"), "good.jpg": None}


def test_empty_members_are_pictures_that_no_decoder_takes(tmp_path: Path) -> None:  # C56
    found = answers(tmp_path, zipped([(f"{number}.jpg", b"") for number in range(9000)]), ZIP)
    assert [one.position for one in found] == list(range(9000))
    assert {one.data for one in found} == {b""}
    with pytest.raises(UnreadableImage):
        Limits().check_bytes(0)


def test_odd_names_are_shown_safely_and_have_steady_ids(tmp_path: Path) -> None:  # C57
    members = [("ok.jpg", JPEG), ("dup.jpg", JPEG), ("dup.jpg", PNG), ("x" * 300 + ".jpg", JPEG), ("a\nb.jpg", JPEG)]
    members += [("\u202egpj.exe.jpg", JPEG), ("caf\u00e9/\u56fe.jpg", JPEG), ("-a.jpg", JPEG), ("\u56fe", PNG)]
    junk = [("__MACOSX/._ok.jpg", b"x"), (".DS_Store", b"x"), ("Thumbs.db", b"x"), ("dir/", b""), (".git/a.jpg", JPEG)]
    found = answers(tmp_path, zipped([*members, *junk]), ZIP)
    assert [one.code for one in found] == [None, None, "duplicate-id", *[None] * 6]
    assert all(one.name.isprintable() and len(one.name) <= 220 for one in found)
    assert [one.name for one in found[-5:-2]] == ["a\\nb.jpg", "\\u202egpj.exe.jpg", "caf\u00e9/\u56fe.jpg"]
    ids = [one.item_id for one in found]
    assert ids[:2] == ["ok.jpg", "dup.jpg"]
    assert ids[5] == "gpj.exe.jpg-dcb01f7ffa14"
    assert ids[6] == "caf---.jpg-b66e0c5f0439"
    assert len(ids[3] or "") == 128
    assert len(set(ids)) == len(ids)
    assert answers(tmp_path, zipped([*members, *junk]), ZIP) == found
    assert counted(ZIP, Places(tmp_path)) == len(found)


def test_a_second_member_with_an_id_names_the_first(tmp_path: Path) -> None:
    (tmp_path / "upload").write_bytes(zipped([("dup.jpg", JPEG), ("./dup.jpg", PNG)]))
    with entries(ZIP, Places(tmp_path), 1) as found:
        second = next(found)
    assert isinstance(second, Failure)
    assert second.detail == "id dup.jpg came before, at dup.jpg: an id comes once"


@pytest.mark.parametrize(
    "data",
    [b"", b"PK", b"Rar!\x1a\7" + bytes(100), b"7z\xbc\xaf\x27\x1c" + bytes(100), b"PK\5\6" + b"\xff" * 18]
    + [zipped([("a.jpg", JPEG), ("b.jpg", JPEG)])[:-size] for size in (1, 40, 100, 2000)],
)
def test_what_is_no_whole_zip_is_refused(tmp_path: Path, data: bytes) -> None:  # C58
    assert "send it" in refusal(tmp_path, data, ZIP)


def test_an_encrypted_member_fails(tmp_path: Path) -> None:  # C59
    for flags in (0x1, 0x41, 0x20, 0x2000):
        found = answers(tmp_path, shaped(zipped([("a.jpg", JPEG)]), flags=flags), ZIP)
        assert [one.code for one in found] == ["encrypted-member"]


def test_a_compression_that_is_not_read_fails_only_its_member(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        found = answers(tmp_path, zipped([("a.jpg", JPEG)], method), ZIP)
        assert [one.code for one in found] == ["unsupported-member"]
    assert codes(tmp_path, zipped([("a.jpg", JPEG)], zipfile.ZIP_STORED), ZIP) == {"a.jpg": None}


def test_a_flipped_byte_fails_its_member_and_no_other(tmp_path: Path) -> None:
    data = bytearray(zipped([("a.jpg", JPEG), ("b.jpg", JPEG)]))
    data[60] ^= 0xFF
    assert codes(tmp_path, bytes(data), ZIP) == {"a.jpg": "broken-member", "b.jpg": None}
    plain = bytearray(zipped([("a.jpg", JPEG), ("b.jpg", JPEG)], zipfile.ZIP_STORED))
    plain[60] ^= 0xFF
    assert codes(tmp_path, bytes(plain), ZIP) == {"a.jpg": "broken-member", "b.jpg": None}


def test_a_directory_that_names_bytes_behind_the_members_is_refused(tmp_path: Path) -> None:
    for changes in ({"packed": 10_000_000}, {"offset": 10_000_000}):
        assert "does not have" in refusal(tmp_path, shaped(zipped([("a.jpg", JPEG)]), **changes), ZIP)


def test_a_zip_behind_other_bytes_and_with_a_comment_is_read(tmp_path: Path) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.jpg", JPEG)
        archive.comment = b"from the shop"
    assert codes(tmp_path, b"#!/bin/sh\nexit\n" + target.getvalue(), ZIP) == {"a.jpg": None}


def test_a_zip_that_was_written_as_a_stream_and_one_with_64_bit_sizes_are_read(tmp_path: Path) -> None:
    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: object) -> int:
            raise io.UnsupportedOperation

    target = Unseekable()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jpg", JPEG)
        with archive.open("b.jpg", "w", force_zip64=True) as member:
            member.write(PNG)
    assert codes(tmp_path, target.getvalue(), ZIP) == {"a.jpg": None, "b.jpg": None}
    plain = zipped([("a.jpg", JPEG)])
    place = plain.rindex(b"PK\1\2")
    record = bytearray(plain[place : place + 46 + 5])
    packed, size = struct.unpack_from("<2L", record, 20)
    wide = struct.pack("<2H3Q", 1, 24, size, packed, 0)
    struct.pack_into("<2L", record, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", record, 30, len(wide))
    struct.pack_into("<L", record, 42, 0xFFFFFFFF)
    listed = bytes(record) + wide
    ending = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(listed), place)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, place + len(listed), 1)
    whole = plain[:place] + listed + ending + locator
    whole += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    assert zipfile.ZipFile(io.BytesIO(whole)).read("a.jpg") == JPEG
    assert codes(tmp_path, whole, ZIP) == {"a.jpg": None}
    assert "directory is broken" in refusal(tmp_path, whole.replace(wide, wide[:2] + b"\x08\0" + wide[4:]), ZIP)


def test_a_name_in_utf8_is_read_as_such_also_where_the_zip_does_not_say_so(tmp_path: Path) -> None:
    data = zipped([("図.jpg", JPEG)])
    unsaid = shaped(data, flags=0)
    old = shaped(zipped([("aa.jpg", JPEG)]), flags=0).replace(b"aa.jpg", b"\x82a.jpg")
    assert [one.name for one in answers(tmp_path, unsaid, ZIP)] == ["図.jpg"]
    assert [one.name for one in answers(tmp_path, old, ZIP)] == ["éa.jpg"]


def test_any_damage_to_a_zip_is_a_refusal_or_failures(tmp_path: Path) -> None:
    whole, chance = zipped([("a.jpg", JPEG[:300]), ("b.jpg", PNG[:300])]), random.Random(5)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(whole))] = chance.choice((0, 0xFF, chance.randrange(256)))
        try:
            cut = chance.choice((len(whole), chance.randrange(len(whole))))
            found = answers(tmp_path, bytes(damaged[:cut]), ZIP)
        except SourceError:
            continue
        assert all(one.data in (JPEG[:300], PNG[:300], None) for one in found)


def test_a_resumed_zip_goes_on_at_its_place_without_reading_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = zipped([(f"{number}.jpg", JPEG) for number in range(20)] + [("../x.jpg", JPEG), ("z.jpg", PNG)])
    whole, read, seen = answers(tmp_path, data, ZIP), zips.read, []

    def noted(file: BinaryIO, record: zips.Record) -> bytes:
        seen.append(record.name)
        return read(file, record)

    monkeypatch.setattr(zips, "read", noted)
    for start in (0, 7, 20, 21, 22, 50):
        assert answers(tmp_path, data, ZIP, start) == whole[start:]
    assert len(seen) == 21 + 14 + 1 + 1


def test_labels_are_the_folders_that_hold_the_files_where_that_is_wished(tmp_path: Path) -> None:
    members = ["top.jpg", "cats/a.jpg", "pets/dogs/b.jpg", "x" * 300 + "/c.jpg"]
    for kind, data in (
        ("zip", zipped([(name, JPEG) for name in members])),
        ("tar", tarred([(name, tarfile.REGTYPE, JPEG) for name in members])),
    ):
        source = {"kind": kind, "upload": "upload"}
        found = answers(tmp_path, data, source | {"labels": "folder"})
        assert [one.label for one in found] == [None, "cats", "dogs", None]
        assert [one.code for one in found] == [None, None, None, "invalid-item"]
        assert {one.label for one in answers(tmp_path, data, source)} == {None}


def test_more_members_than_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_ENTRIES", 10)
    names = [f"{number}/" for number in range(11)]  # folders are no entries, but they count
    assert "more than 10 members" in refusal(tmp_path, zipped([(name, b"") for name in names]), ZIP)
    assert "more than 10 members" in refusal(tmp_path, tarred([(name, tarfile.DIRTYPE, b"") for name in names]), TAR)
    assert answers(tmp_path, tarred([(name, tarfile.DIRTYPE, b"") for name in names[:10]]), TAR) == []


def test_thirty_thousand_members_take_little_memory_and_time(tmp_path: Path) -> None:
    record = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 10, 0)
    count, listed, contents = 30_000, bytearray(), bytearray()
    for number in range(count):
        name = b"%06d.jpg" % number
        listed += record[:42] + struct.pack("<L", len(contents)) + name
        contents += local + name
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, len(listed), len(contents), 0)
    (tmp_path / "upload").write_bytes(contents + listed + end)
    tracemalloc.start()
    start = time.monotonic()
    with entries(ZIP, Places(tmp_path)) as found:
        assert next(found).name == "000000.jpg"
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000
    assert time.monotonic() - start < 10


# --- tar


def test_a_tar_with_links_devices_and_slips_gives_its_good_members_alone(tmp_path: Path) -> None:  # C60
    kinds = {
        "s.jpg": tarfile.SYMTYPE,
        "h.jpg": tarfile.LNKTYPE,
        "dev.jpg": tarfile.CHRTYPE,
        "fifo.jpg": tarfile.FIFOTYPE,
    }
    members = [("good.jpg", tarfile.REGTYPE, JPEG), ("../slip.jpg", tarfile.REGTYPE, JPEG)]
    members += [("/abs.jpg", tarfile.REGTYPE, JPEG), *((name, kind, b"") for name, kind in kinds.items())]
    members += [("chain", tarfile.SYMTYPE, b""), ("chain/good2.jpg", tarfile.REGTYPE, JPEG)]
    expected = {"good.jpg": None, "../slip.jpg": "unsafe-path", "/abs.jpg": "unsafe-path"}
    expected |= dict.fromkeys([*kinds, "chain"], "not-a-file") | {"chain/good2.jpg": None}  # its bytes lie in the tar
    for mode in ("w", "w:gz"):
        for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
            assert codes(tmp_path, tarred(members, mode, form), TAR) == expected


def test_a_tar_bomb_is_given_up_at_the_limit(tmp_path: Path) -> None:  # C61
    start = time.monotonic()
    bomb = tarred([("z.jpg", tarfile.REGTYPE, bytes(100 << 20)), ("a.jpg", tarfile.REGTYPE, JPEG)])
    written = time.monotonic()
    assert "unpacks to over" in refusal(tmp_path, bomb, TAR)
    assert time.monotonic() - written < max(1.0, written - start)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_that_breaks_off_gives_what_was_whole_and_one_failure(tmp_path: Path, mode: str) -> None:
    noise = random.Random(2).randbytes(3000)  # so that a cut of the packed file is one of the unpacked
    whole = tarred([(f"{number}.jpg", tarfile.REGTYPE, noise) for number in range(5)], mode)
    cuts = range(6200, len(whole), 700) if mode == "w:gz" else [*range(3600, 20_480 - 3072, 256)]
    for cut in cuts:
        found = answers(tmp_path, whole[:cut], TAR)
        assert {one.data for one in found} <= {noise, None}
        assert [one.code for one in found][:1] == [None]
        assert found[-1].code in ("archive-cut", "broken-member")
        assert sum(one.code == "archive-cut" for one in found) == 1
        assert all(one.code is None for one in found[:-2])


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    bad = [b"", b"x" * 2000, JPEG, b"\x1f\x8b" + bytes(50), gzip.compress(b""), gzip.compress(JPEG), b"BZh91AY" + JPEG]
    for data in bad:
        assert "no tar" in refusal(tmp_path, data, TAR)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
@pytest.mark.parametrize("size", [2_000_000, 8 << 30, -512])
def test_a_header_of_any_size_is_not_read_into_memory(tmp_path: Path, kind: bytes, size: int) -> None:
    member = tarfile.TarInfo("header")
    member.type, member.size = kind, size
    header = member.tobuf(tarfile.GNU_FORMAT)
    good = tarred([("good.jpg", tarfile.REGTYPE, JPEG)], "w")[: 512 + -(-len(JPEG) // 512) * 512]
    data = gzip.compress(good + header + bytes(30_000_000), 1)
    tracemalloc.start()
    found = answers(tmp_path, data, TAR)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.code for one in found] == [None, "archive-cut"]
    assert peak < 4_000_000


def test_headers_that_follow_each_other_for_ever_end_the_tar(tmp_path: Path) -> None:
    member = tarfile.TarInfo("header")
    member.type = b"x"
    good = tarred([("good.jpg", tarfile.REGTYPE, JPEG)], "w")[: 512 + -(-len(JPEG) // 512) * 512]
    found = answers(tmp_path, good + member.tobuf(tarfile.PAX_FORMAT) * 3000, TAR)
    assert [one.code for one in found] == [None, "archive-cut"]


def test_a_tar_remembers_nothing_of_what_is_behind(tmp_path: Path) -> None:
    (tmp_path / "upload").write_bytes(tarred([(f"{number}.jpg", tarfile.REGTYPE, b"x") for number in range(300)]))
    with entries(TAR, Places(tmp_path)) as found:
        assert sum(len(one.read()) for one in islice(found, 300) if isinstance(one, Entry)) == 300
        assert sum(type(one) is tarfile.TarInfo for one in gc.get_objects()) < 5


def test_a_tar_that_leads_back_ends_there(tmp_path: Path) -> None:
    member = tarfile.TarInfo("back.jpg")
    member.size = -1024  # its successor would be the header before it, for ever
    data = tarred([("good.jpg", tarfile.REGTYPE, JPEG)], "w")[: 512 + -(-len(JPEG) // 512) * 512]
    (tmp_path / "upload").write_bytes(data + member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with entries(TAR, Places(tmp_path)) as found:
        assert [one.name for one in found] == ["good.jpg", "back.jpg", "the archive's end"]


def test_a_resumed_tar_goes_on_at_its_place(tmp_path: Path) -> None:
    data = tarred([(f"{number}.jpg", tarfile.REGTYPE, JPEG) for number in range(9)])
    whole = answers(tmp_path, data, TAR)
    for start in (0, 4, 9):
        assert answers(tmp_path, data, TAR, start) == whole[start:]
    assert counted(TAR, Places(tmp_path)) is None


def test_members_need_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "upload").write_bytes(tarred([(f"{number}.jpg", tarfile.REGTYPE, JPEG) for number in range(9)]))
    with entries(TAR, Places(tmp_path)) as found:
        read = [one.read() for one in found if isinstance(one, Entry) and one.position % 3 == 1]
    assert read == [JPEG] * 3


def test_a_tar_member_over_20_mb_fails_unread_and_the_next_goes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "MOST_BYTES", len(JPEG))
    monkeypatch.setattr(entry, "Limits", lambda: Limits(bytes=len(JPEG)))
    data = tarred([("a.jpg", tarfile.REGTYPE, JPEG + b"x"), ("b.jpg", tarfile.REGTYPE, JPEG)])
    assert codes(tmp_path, data, TAR) == {"a.jpg": "image-too-large", "b.jpg": None}


def test_a_sparse_member_fails(tmp_path: Path) -> None:
    member = tarfile.TarInfo("sparse.jpg")
    member.type = tarfile.GNUTYPE_SPARSE
    found = answers(tmp_path, member.tobuf(tarfile.GNU_FORMAT) + bytes(1024), TAR)
    assert [one.code for one in found] == ["not-a-file"]


def test_any_damage_to_a_tar_is_a_refusal_or_failures(tmp_path: Path) -> None:
    members = [("a.jpg", tarfile.REGTYPE, JPEG[:300]), ("é" * 90, tarfile.REGTYPE, b"x"), ("b", tarfile.SYMTYPE, b"")]
    chance = random.Random(9)
    pack: tuple[Callable[[bytes], bytes], ...] = (bytes, gzip.compress)
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        whole = tarred(members, "w", form)[:5000]
        for _ in range(100):
            damaged = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                damaged[chance.randrange(len(whole))] = chance.choice((0, 0xFF, 0x30, chance.randrange(256)))
            try:
                answers(tmp_path, chance.choice(pack)(bytes(damaged[: chance.randrange(len(whole))])), TAR)
            except SourceError:
                continue


def test_the_directory_of_a_zip_is_read_as_pythons_own_reader_does(tmp_path: Path) -> None:
    chance = random.Random(1)
    members = [(f"{number}/é{number}.jpg", chance.randbytes(chance.randrange(5000))) for number in range(50)]
    (tmp_path / "upload").write_bytes(zipped([*members, ("b.jpg", bytes(200_000))]))
    with (tmp_path / "upload").open("rb") as file, zipfile.ZipFile(tmp_path / "upload") as archive:
        listed = list(zips.records(file, zips.find_directory(file)))
        assert [(one.name, one.offset, one.packed, one.size, one.crc) for one in listed] == [
            (one.filename, one.header_offset, one.compress_size, one.file_size, one.CRC) for one in archive.infolist()
        ]
        assert [zips.read(file, one) for one in listed] == [archive.read(one) for one in archive.infolist()]
        assert zlib.crc32(zips.read(file, listed[0])) == listed[0].crc

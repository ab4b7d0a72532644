"""The photographs of the default bundle's calibration: their containers, their selection, their checks."""

import hashlib
import io
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from training.default_bundle import photographs
from training.default_bundle.photographs import (
    PhotographError,
    Row,
    container_entries,
    distinct,
    fetch,
    load,
    read_selection,
)

DEBIAN = "gcompris-qt-data"


def container(files: Sequence[tuple[str, int, bytes]], version: int = 3) -> bytes:
    """A Qt container with one folder `pictures` of files (name, flags, stored content)."""
    names, offsets = b"", []
    for name in ("pictures", *(name for name, _, _ in files)):
        offsets.append(len(names))
        names += struct.pack(">HI", len(name), 0) + name.encode("utf-16-be")
    time = bytes(8) if version > 1 else b""
    tree = struct.pack(">IHII", 0, 2, 1, 1) + time + struct.pack(">IHII", offsets[0], 2, len(files), 2) + time
    contents = b""
    for offset, (_, flags, content) in zip(offsets[1:], files, strict=True):
        tree += struct.pack(">IHHHI", offset, flags, 0, 1, len(contents)) + time
        contents += struct.pack(">I", len(content)) + content
    start = 20 if version < 3 else 24  # version 3 has flags of its own after the offsets
    head = struct.pack(">4sIIII", b"qres", version, start, start + len(tree), start + len(tree) + len(contents))
    return head + bytes(start - 20) + tree + contents + names


def deflated(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + zlib.compress(content)


def picture(seed: int) -> Image.Image:
    """RGB noise on a coarse grid: two seeds give pictures that do not correlate."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((96, 96), Image.Resampling.NEAREST)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_cache(cache: Path, selection: Path) -> list[bytes]:
    """A cache with two pictures in a container and one on its own, and the selection that names them."""
    data = [png(picture(seed)) for seed in range(3)]
    folder = cache / DEBIAN
    folder.mkdir(parents=True)
    (folder / "a.rcc").write_bytes(container([("0.png", 0, data[0]), ("1.png", 1, deflated(data[1]))]))
    (folder / "b.png").write_bytes(data[2])
    paths = ["a.rcc:/pictures/0.png", "a.rcc:/pictures/1.png", "b.png"]
    rows = [Row(DEBIAN, path, hashlib.sha256(bytes_).hexdigest()) for path, bytes_ in zip(paths, data, strict=True)]
    photographs.write_selection(rows, selection)
    return data


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_container_gives_plain_and_deflated_files_with_their_paths(version: int) -> None:
    files = [("plain.txt", 0, b"as it stands"), ("grün.txt", 1, deflated(b"inflated" * 20)), ("empty", 0, b"")]
    assert dict(container_entries(container(files, version))) == {
        "/pictures/plain.txt": b"as it stands",
        "/pictures/grün.txt": b"inflated" * 20,
        "/pictures/empty": b"",
    }


def test_what_is_no_container_or_is_cut_off_or_needs_zstd_is_refused() -> None:
    with pytest.raises(ValueError, match="not a Qt resource container"):
        list(container_entries(b"PK\x03\x04" + bytes(40)))
    with pytest.raises(ValueError, match="version 1 to 3"):
        list(container_entries(container([], version=4)))
    with pytest.raises(ValueError, match="cut off"):
        list(container_entries(container([("a", 0, b"content")])[:60]))
    with pytest.raises(ValueError, match=r"/pictures/a is compressed with zstd"):
        list(container_entries(container([("a", 4, b"content")])))


def test_the_committed_selection_names_at_least_520_different_photographs() -> None:
    rows = read_selection()
    assert len(rows) >= 520
    assert len({row.name for row in rows}) == len({row.sha256 for row in rows}) == len(rows)
    assert {row.package for row in rows} == set(photographs.PHOTOGRAPHS)
    assert all(re.fullmatch("[0-9a-f]{64}", row.sha256) for row in rows)
    assert [row.name for row in rows] == sorted(row.name for row in rows)


def test_every_selected_path_is_chosen_by_the_lists_and_no_drawing_is() -> None:
    assert [row.path for row in read_selection() if not photographs.is_chosen(row.package, row.path)] == []
    stamps = "usr/share/tuxpaint/stamps"
    for path in ("food/fruit/cartoon/apple.png", "animals/insects/bee.png", "town/flags/redflag.png"):
        assert not photographs.is_chosen("tuxpaint-stamps-default", f"{stamps}/{path}")


def test_load_gives_the_rows_of_the_selection_in_their_order(tmp_path: Path) -> None:
    data = write_cache(tmp_path / "cache", tmp_path / "selection.csv")
    loaded = load(tmp_path / "cache", tmp_path / "selection.csv")
    assert [photograph.data for photograph in loaded] == data
    assert [photograph.name for photograph in loaded] == [
        f"{DEBIAN}/{path}" for path in ("a.rcc:/pictures/0.png", "a.rcc:/pictures/1.png", "b.png")
    ]


def test_a_picture_that_differs_is_named(tmp_path: Path) -> None:
    data = write_cache(tmp_path / "cache", tmp_path / "selection.csv")
    changed = container([("0.png", 0, data[0]), ("1.png", 0, data[1] + b"\0")])
    (tmp_path / "cache" / DEBIAN / "a.rcc").write_bytes(changed)
    with pytest.raises(PhotographError, match=r"a\.rcc:/pictures/1\.png is not the picture of selection\.csv"):
        load(tmp_path / "cache", tmp_path / "selection.csv")


def test_a_picture_that_the_container_lacks_is_named(tmp_path: Path) -> None:
    data = write_cache(tmp_path / "cache", tmp_path / "selection.csv")
    (tmp_path / "cache" / DEBIAN / "a.rcc").write_bytes(container([("0.png", 0, data[0])]))
    with pytest.raises(PhotographError, match=r"a\.rcc:/pictures/1\.png is not the picture"):
        load(tmp_path / "cache", tmp_path / "selection.csv")


def test_a_missing_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    write_cache(tmp_path / "cache", tmp_path / "selection.csv")
    file = tmp_path / "cache" / DEBIAN / "a.rcc"
    file.write_bytes(file.read_bytes()[:70])
    with pytest.raises(PhotographError, match=r"a\.rcc is damaged \(.*cut off"):
        load(tmp_path / "cache", tmp_path / "selection.csv")
    file.write_bytes(container([("0.png", 1, b"\0\0\0\x05no zlib")]))
    with pytest.raises(PhotographError, match=r"a\.rcc is damaged"):
        load(tmp_path / "cache", tmp_path / "selection.csv")
    file.unlink()
    with pytest.raises(
        PhotographError, match=r"a\.rcc is missing: run `python -m training\.default_bundle\.photographs"
    ):
        load(tmp_path / "cache", tmp_path / "selection.csv")


def test_the_first_of_near_duplicates_is_kept_in_whatever_size_mirrored_or_brightness() -> None:
    first, other = picture(1), picture(2)
    brighter = first.point(lambda value: 60 + value // 2)
    assert distinct([first, other, first.resize((333, 200)), ImageOps.mirror(first), brighter]) == [0, 1]
    assert distinct([other, first]) == [0, 1]


def test_even_pictures_are_not_duplicates_of_anything() -> None:
    even = [Image.new("RGB", (50, 50), colour) for colour in ("white", "black")]
    assert distinct([*even, picture(1)]) == [0, 1, 2]


def test_pictures_are_seen_on_white_and_upright() -> None:
    cut_out = Image.new("RGBA", (60, 40), (0, 0, 0, 0))
    assert photographs.upright(png(cut_out)).getpixel((30, 20)) == (255, 255, 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    file = io.BytesIO()
    Image.new("RGB", (60, 40)).save(file, "JPEG", exif=exif)
    assert photographs.upright(file.getvalue()).size == (40, 60)


def test_selecting_leaves_out_what_is_not_chosen_too_small_or_there_already(tmp_path: Path) -> None:
    stamps = tmp_path / "tuxpaint-stamps-default/usr/share/tuxpaint/stamps"
    (stamps / "animals/birds/cartoon").mkdir(parents=True)
    (stamps / "animals/birds/a.png").write_bytes(png(picture(1)))
    (stamps / "animals/birds/a_mirror.png").write_bytes(png(ImageOps.mirror(picture(1))))
    (stamps / "animals/birds/small.png").write_bytes(png(picture(2).resize((39, 90))))
    (stamps / "animals/birds/cartoon/c.png").write_bytes(png(picture(3)))
    rcc = tmp_path / DEBIAN / "usr/share/gcompris-qt/rcc"
    rcc.mkdir(parents=True)
    (rcc / "erase.rcc").write_bytes(container([("x.png", 0, png(picture(4)))]))
    digest = hashlib.sha256(png(picture(1))).hexdigest()
    assert photographs.select(tmp_path) == [
        Row("tuxpaint-stamps-default", "usr/share/tuxpaint/stamps/animals/birds/a.png", digest)
    ]


def test_a_missing_program_is_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PhotographError, match=r"apt-get is not installed: .* use Debian or Ubuntu"):
        fetch(tmp_path / "cache")


def test_a_failed_download_is_one_line_with_its_reason_and_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path, "apt-get", "echo 'W: first' >&2; echo 'E: Unable to locate package' >&2; exit 100")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert photographs.main([str(tmp_path / "cache")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "apt-get download gcompris-qt-data" in said
    assert "E: Unable to locate package" in said
    assert "run `apt-get update`" in said


def test_packages_are_downloaded_and_unpacked_once_also_with_a_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "apt-get", 'echo "$2" >> ../asked; touch "$2_1_all.deb"')
    program(tmp_path, "dpkg", 'test -f "$2" && mkdir "$3" && touch "$3/unpacked"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        fetch(Path("cache"))
    assert (tmp_path / "asked").read_text().split() == list(photographs.PHOTOGRAPHS)
    assert sorted(path.parent.name for path in tmp_path.glob("cache/*/unpacked")) == sorted(photographs.PHOTOGRAPHS)


def test_a_package_that_does_not_unpack_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "apt-get", 'touch "$2_1_all.deb"')
    program(tmp_path, "dpkg", 'mkdir "$3"; exit 2')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(PhotographError, match=r"exit status 2\): delete .*gcompris-qt-data_1_all\.deb and try again"):
        fetch(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["gcompris-qt-data_1_all.deb"]

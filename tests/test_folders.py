"""roadmatch.jobs.folders: pictures in allowed folders of the server, and no way out of them."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from roadmatch.images import Limits
from roadmatch.jobs import folders
from roadmatch.jobs.queue import Failure
from roadmatch.jobs.sources import Entry, EntryFailed, Places, SourceError, counted, entries


def read(
    folder: Path, *allowed: Path, start: int = 0, labels: str | None = None
) -> list[tuple[str, str | None, bytes | str]]:
    """(name, label, bytes or code of the failure) of each entry."""
    source = {"kind": "folder", "folder": str(folder), "labels": labels}
    found: list[tuple[str, str | None, bytes | str]] = []
    with entries(source, Places(folder, allowed or (folder,)), start) as listed:
        for one in listed:
            if isinstance(one, Failure):
                found.append((one.name, None, one.code))
            else:
                found.append((one.name, one.label, data(one)))
    return found


def data(one: Entry) -> bytes | str:
    try:
        return one.read()
    except EntryFailed as error:
        return error.code if "/" not in error.detail else "it tells a path of the server"


def fill(folder: Path, *names: str) -> None:
    """Files that hold their own names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.fsencode(name))


def test_files_come_sorted_and_the_same_at_every_reading(tmp_path: Path) -> None:
    names = ["a/1.jpg", "a/b/2.jpg", "a.jpg", "z/9.jpg", "é/x.jpg", "B.jpg", "10.jpg", "9.jpg"]
    fill(tmp_path, *random.Random(1).sample(names, len(names)))
    fill(tmp_path, ".DS_Store", "__MACOSX/x.jpg", "Thumbs.db", ".git/a.jpg", "a/.hidden.jpg")
    expected = ["10.jpg", "9.jpg", "B.jpg", "a/1.jpg", "a/b/2.jpg", "a.jpg", "z/9.jpg", "é/x.jpg"]
    whole = read(tmp_path)
    assert [(name, held) for name, _, held in whole] == [(name, name.encode()) for name in expected]
    assert read(tmp_path, start=3) == whole[3:]
    assert counted({"kind": "folder", "folder": str(tmp_path)}, Places(tmp_path, (tmp_path,))) == 8


def test_a_label_is_the_name_of_the_folder_that_holds_the_file(tmp_path: Path) -> None:
    fill(tmp_path, "top.jpg", "cats/a.jpg", "pets/dogs/b.jpg")
    found = read(tmp_path, labels="folder")
    assert {name: label for name, label, _ in found} == {
        "cats/a.jpg": "cats",
        "pets/dogs/b.jpg": "dogs",
        "top.jpg": None,
    }


def test_links_lead_nowhere_but_to_files_of_allowed_folders(tmp_path: Path) -> None:
    shop, secret, other = tmp_path / "shop", tmp_path / "secret", tmp_path / "other"
    fill(shop, "in/a.jpg")
    fill(secret, "s.jpg")
    fill(other, "o.jpg")
    (shop / "b.jpg").symlink_to(shop / "in/a.jpg")
    (shop / "c.jpg").symlink_to(secret / "s.jpg")
    (shop / "d").symlink_to(secret)
    (shop / "e").symlink_to(shop)
    (shop / "f.jpg").symlink_to(shop / "f.jpg")
    (shop / "g.jpg").symlink_to(shop / "nowhere")
    (shop / "h.jpg").symlink_to(other / "o.jpg")
    assert {name: held for name, _, held in read(shop, shop, other)} == {
        "b.jpg": b"in/a.jpg",
        "c.jpg": "unsafe-path",
        "d": "folder-not-read",
        "e": "folder-not-read",
        "f.jpg": "unreadable-file",
        "g.jpg": "file-missing",
        "h.jpg": b"o.jpg",
        "in/a.jpg": b"in/a.jpg",
    }


def test_what_is_no_picture_file_fails_without_being_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    fill(tmp_path, "a.zip", "b.jpg")
    assert read(tmp_path) == [
        ("a.zip", None, "nested-archive"),
        ("b.jpg", None, b"b.jpg"),
        ("pipe.jpg", None, "not-a-file"),
    ]


def test_a_file_over_20_mb_fails_unread(tmp_path: Path) -> None:
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(1 << 40)
    with (tmp_path / "b.jpg").open("wb") as file:
        file.truncate(Limits().bytes)
    (_, _, first), (_, _, second) = read(tmp_path)
    assert first == "image-too-large"
    assert len(second) == Limits().bytes


def test_what_cannot_be_read_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a/1.jpg", "b.jpg", "c.jpg")
    listdir, open_ = os.listdir, os.open

    def refuse(path: str) -> list[str]:
        if str(path).endswith("/a"):
            raise PermissionError
        return listdir(path)

    def refuse_file(path: Path, flags: int) -> int:
        if path.name == "b.jpg":
            raise PermissionError
        return open_(path, flags)

    monkeypatch.setattr(folders.os, "listdir", refuse)  # type: ignore[attr-defined]  # root may read everything
    monkeypatch.setattr(folders.os, "open", refuse_file)  # type: ignore[attr-defined]
    assert [(name, held) for name, _, held in read(tmp_path)] == [
        ("a", "folder-not-read"),
        ("b.jpg", "unreadable-file"),
        ("c.jpg", b"c.jpg"),
    ]


def test_folders_that_lie_deeper_than_python_calls_are_walked(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1050):
        os.mkdir("d", dir_fd=here)
        there = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = there
    os.close(os.open("x.jpg", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    found = read(tmp_path)
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # which pytest cannot, for the same reason
    assert [(len(name) <= 200, held) for name, _, held in found] == [(True, b"")]


@pytest.mark.parametrize(
    "folder", ["secret", "shop/../secret", "link", "nowhere", "shop/file.jpg", "", "shopping", "a\0b", ".."]
)
def test_a_folder_that_is_not_allowed_is_refused(tmp_path: Path, folder: str) -> None:
    for name in ("secret", "shop", "shopping"):
        (tmp_path / name).mkdir()
    fill(tmp_path, "shop/file.jpg", "secret/s.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match="ROADMATCH_IMPORT_FOLDERS"):
        read(Path(f"{tmp_path}/{folder}") if folder else Path("/"), tmp_path / "shop")


def test_a_folder_below_an_allowed_one_and_a_link_to_one_are_allowed(tmp_path: Path) -> None:
    fill(tmp_path, "shop/summer/a.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "shop")
    assert read(tmp_path / "shop/summer", tmp_path / "link") == [("a.jpg", None, b"shop/summer/a.jpg")]
    assert read(tmp_path / "link/summer", tmp_path / "shop") == [("a.jpg", None, b"shop/summer/a.jpg")]


def test_without_allowed_folders_the_setting_is_named(tmp_path: Path) -> None:
    source = {"kind": "folder", "folder": str(tmp_path)}
    with pytest.raises(SourceError, match="ROADMATCH_IMPORT_FOLDERS"), entries(source, Places(tmp_path)) as found:
        next(found)


def test_names_that_are_no_utf8_are_shown_and_have_an_id(tmp_path: Path) -> None:
    fill(tmp_path, os.fsdecode(b"caf\xe9.jpg"), "a\nb.jpg")
    with entries({"kind": "folder", "folder": str(tmp_path)}, Places(tmp_path, (tmp_path,))) as found:
        listed = [one for one in found if isinstance(one, Entry)]
    assert [one.name for one in listed] == ["a\\nb.jpg", "caf\\udce9.jpg"]
    assert [one.item_id[:-12] for one in listed] == ["a-b.jpg-", "caf-.jpg-"]

import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from app.backup import back_up
from app.settings import Settings, SettingsError
from roadmatch.errors import StoreUnavailable
from tests.bundles import picture
from tests.postgres import PostgresServer
from tests.service import environment, running


def backup(data: Path, folder: Path, bundle: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", "backup", str(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(data, bundle), timeout=60, check=False
    )


def put(url: str, number: int) -> None:
    files = {"image": (f"{number}.png", picture(number, side=32), "image/png")}
    assert httpx.put(f"{url}/v1/galleries/g/items/i{number}", files=files, timeout=30).status_code in (200, 201)


def put_all(url: str, numbers: range) -> None:
    for number in numbers:
        put(url, number)


def test_a_backup_made_while_uploads_come_is_served_with_every_picture_that_it_names(
    tmp_path: Path, bundle: Path
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copies" / "monday"
    with running(data, bundle) as served:
        assert httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).status_code == 201
        put_all(served.url, range(8))
        assert httpx.delete(f"{served.url}/v1/galleries/g/items/i0").status_code == 204
        more = threading.Thread(target=put_all, args=(served.url, range(8, 40)))
        more.start()
        done = backup(data, copy, bundle)
        more.join()
        assert done.returncode == 0, done.stderr
        assert "pictures" in done.stdout
    with running(copy, bundle) as restored:
        listed = httpx.get(f"{restored.url}/v1/galleries/g/items", params={"limit": 100}).json()["items"]
        names = {item["id"] for item in listed}
        assert {f"i{number}" for number in range(1, 8)} <= names
        assert "i0" not in names
        for item in listed:
            image = item["images"][0]["id"]
            assert httpx.get(f"{restored.url}/v1/galleries/g/images/{image}").status_code == 200
        answer = httpx.post(
            f"{restored.url}/v1/galleries/g/search", files={"image": picture(3, side=32)}, timeout=30
        ).json()
        best = [*answer["matches"], *answer["near_misses"]][0]
        assert (best["item"], best["similarity"]) == ("i3", 1.0)
        put(restored.url, 99)
    assert [path.name for path in copy.parent.iterdir() if path.name.startswith(".")] == []


def test_a_backup_takes_the_place_of_nothing_and_leaves_nothing_half_made(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    refused = backup(tmp_path / "data", tmp_path / "there", bundle)
    assert refused.returncode == 1
    assert refused.stderr == f"roadmatch: {tmp_path / 'there'}: is there already: name a new folder\n"
    nothing = backup(tmp_path / "data", tmp_path / "new", bundle)
    assert nothing.returncode == 1
    assert "is not there: name the data folder of a service that uses SQLite" in nothing.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_a_damaged_database_is_no_backup(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "roadmatch.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnavailable, match=r"roadmatch.db cannot be copied: file is not a database"):
        back_up(Settings.read({}, data=data), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_postgresql_is_left_to_its_own_tools(tmp_path: Path, postgres_server: PostgresServer) -> None:
    with pytest.raises(SettingsError, match="copy it with pg_dump"):
        back_up(Settings.read({}, data=tmp_path, database=postgres_server.url()), tmp_path / "copy")

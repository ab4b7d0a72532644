import itertools
import json
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Response
from PIL import Image
from starlette.testclient import TestClient

from app.main import create_app
from app.service import Service
from tests.bundles import DEFAULT_RULE, edited, picture, tiny_bundle
from tests.service import open_here

NUMBERS = itertools.count()


@pytest.fixture
def gallery(client: TestClient) -> str:
    """An empty gallery's address."""
    name = f"g{next(NUMBERS)}"
    assert client.post("/v1/galleries", json={"name": name}).status_code == 201
    return f"/v1/galleries/{name}"


def put(client: TestClient, gallery: str, item: str, *seeds: int, **fields: str) -> Any:
    files = [("image", picture(seed)) for seed in seeds]
    return client.put(f"{gallery}/items/{item}", files=files, data=fields)


def assert_problem(answer: Response, status: int, code: str | None = None) -> str:
    """It is a whole problem of one line -> its detail."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"]
    problem = answer.json()
    assert set(problem) == {"type", "title", "status", "code", "detail"}
    assert problem["status"] == status
    assert problem["type"] == f"urn:roadmatch:problem:{problem['code']}"
    if code is not None:
        assert problem["code"] == code
    detail = str(problem["detail"])
    assert detail
    assert detail.isprintable()
    for betrayal in ("Traceback", str(Path.cwd()), tempfile.gettempdir(), ".py", "<class", "site-packages"):
        assert betrayal not in detail
    return detail


# --- galleries


def test_a_new_gallery_has_the_defaults_of_the_service_and_an_address(client: TestClient, service: Service) -> None:
    answer = client.post("/v1/galleries", json={"name": "shoes"})
    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/galleries/shoes"
    shown = answer.json()
    assert shown["bundle"] == service.default_bundle
    assert shown["rule"] == DEFAULT_RULE
    assert (shown["keep"], shown["items"], shown["images"], shown["seq"]) == ("original", 0, 0, 0)
    assert shown["calibration"] == "not_checked"
    assert shown["created_at"].endswith("Z")
    assert client.get("/v1/galleries/shoes").json() == shown
    assert_problem(client.post("/v1/galleries", json={"name": "shoes"}), 409, "gallery-exists")


def test_a_gallery_shows_its_size_and_the_threshold_of_that_size(client: TestClient, gallery: str) -> None:
    empty = client.get(gallery).json()
    for number in range(3):
        put(client, gallery, f"i{number}", number, number + 10)
    shown = client.get(gallery).json()
    assert (shown["items"], shown["images"], shown["seq"]) == (3, 6, 6)
    assert shown["threshold"] > empty["threshold"]
    assert shown["stated_rate"]["here"]["gallery_images"] == 6


def test_rule_and_keep_of_a_gallery_can_be_changed_and_nothing_else(client: TestClient, gallery: str) -> None:
    changed = client.patch(gallery, json={"rule": "max_f1", "keep": "none"})
    assert changed.status_code == 200
    assert (changed.json()["rule"], changed.json()["keep"]) == ("max_f1", "none")
    assert client.patch(gallery, json={}).json() == changed.json()
    assert "bundle" in assert_problem(client.patch(gallery, json={"bundle": "x@0"}), 422)
    assert "max_f1" in assert_problem(client.patch(gallery, json={"rule": "nonsense"}), 422, "unknown-rule")
    assert_problem(client.patch(gallery, json={"keep": "thumbnails"}), 422)
    assert_problem(client.patch("/v1/galleries/nowhere", json={"rule": "max_f1"}), 404, "gallery-not-found")


def test_a_deleted_gallery_is_gone_with_all_it_held(client: TestClient, gallery: str, service: Service) -> None:
    url = put(client, gallery, "a", 1).json()["item"]["images"][0]["url"]
    assert client.delete(gallery).status_code == 204
    assert client.delete(gallery).status_code == 404
    assert_problem(client.get(gallery), 404, "gallery-not-found")
    assert_problem(client.get(url), 404)
    assert_problem(client.post(f"{gallery}/search", files={"image": picture(1)}), 404, "gallery-not-found")
    client.post("/v1/galleries", json={"name": gallery.rsplit("/", 1)[1]})
    assert client.get(f"{gallery}/items").json()["items"] == []
    answer = client.post(f"{gallery}/search", files={"image": picture(1)}).json()
    assert (answer["decision"], answer["best_score"]) == ("no_match", None)


def test_galleries_are_listed_by_name_in_pages(client: TestClient) -> None:
    for name in ("pages-c", "pages-a", "pages-b"):
        client.post("/v1/galleries", json={"name": name})
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = client.get("/v1/galleries", params={"limit": "2", **cursor}).json()
        seen += [shown["name"] for shown in page["galleries"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert seen == sorted(seen)
    assert [name for name in seen if name.startswith("pages-")] == ["pages-a", "pages-b", "pages-c"]


def test_a_gallery_whose_bundle_is_not_loaded_is_shown_and_hides_no_other(tmp_path: Path, bundle: Path) -> None:
    other = tiny_bundle(tmp_path / "other", name="other").folder
    with TestClient(create_app(open_here(tmp_path / "data", other))) as before:
        before.post("/v1/galleries", json={"name": "old"})
        before.put("/v1/galleries/old/items/a", files={"image": picture(1)})
    with TestClient(create_app(open_here(tmp_path / "data", bundle))) as client:
        client.post("/v1/galleries", json={"name": "young"})
        old, young = client.get("/v1/galleries").json()["galleries"]
        assert (old["name"], old["items"], old["threshold"], old["stated_rate"]) == ("old", 1, None, None)
        assert young["threshold"] is not None
        for address, files in (
            ("/v1/galleries/old/search", [("image", picture(1))]),
            ("/v1/galleries/old/search-batch", [("image", picture(1)), ("image", picture(2))]),
            ("/v1/galleries/old/items", [("image", picture(1))]),
        ):
            assert "ROADMATCH_BUNDLES" in assert_problem(client.post(address, files=files), 404, "bundle-not-found")
        assert client.delete("/v1/galleries/old").status_code == 204


@pytest.mark.parametrize(
    "name",
    ["..", ".", "a/b", "a\0", "", " a", "a ", "a\n", "x" * 129, "é", "\N{CAT FACE}", "-a", "a:b", "<img>", "\ud800"],
)
def test_odd_names_of_galleries_are_refused(client: TestClient, name: str) -> None:
    assert_problem(client.post("/v1/galleries", content=json.dumps({"name": name}), headers=JSON), 422)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "path", ["%2e%2e", "%2E", "%00", "x" * 300, "%F0%9F%90%B1", "%ff", "a%0a", "%20", "a%3Fb", "%ED%A0%80"]
)
def test_odd_names_in_addresses_are_refused_wherever_they_stand(client: TestClient, gallery: str, path: str) -> None:
    image = {"image": picture(1)}
    for answer in (
        client.get(f"/v1/galleries/{path}"),
        client.delete(f"/v1/galleries/{path}"),
        client.post(f"/v1/galleries/{path}/search", files=image),
        client.put(f"{gallery}/items/{path}", files=image),
        client.get(f"{gallery}/items/{path}"),
        client.get(f"{gallery}/images/{path}"),
        client.delete(f"{gallery}/items/a/images/{path}"),
    ):
        assert_problem(answer, 422, "invalid-request")
    assert client.get(gallery).json()["items"] == 0


def test_a_slash_in_a_name_leads_nowhere(client: TestClient, gallery: str) -> None:
    assert_problem(client.put(f"{gallery}/items/a%2Fb", files={"image": picture(1)}), 404, "not-found")
    assert_problem(client.get("/v1/galleries/a%2Fb"), 404, "not-found")
    assert_problem(client.get("/v1/galleries/..%2f..%2fetc%2fpasswd"), 404, "not-found")


def test_names_of_other_case_are_other_galleries(client: TestClient) -> None:
    for name in ("Case", "case", "con", "nul.txt"):
        assert client.post("/v1/galleries", json={"name": name}).status_code == 201
        assert client.get(f"/v1/galleries/{name}").json()["name"] == name


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 422),
        ("{", 422),
        ("[]", 422),
        ('"shoes"', 422),
        ("null", 422),
        ('{"name": "new", "surprise": 1}', 422),
        ('{"name": 5}', 422),
        ('{"name": "new", "rule": NaN}', 422),
        ('{"name": "new", "bundle": "nothing@0"}', 404),
        ('{"name": "new", "bundle": "../../x"}', 404),
        ('{"name": "new", "rule": "false_match_rate<=0.0001"}', 422),
        ("[" * 60_000, 400),
        ('{"name": "' + "x" * 60_000 + '"}', 422),
        ('{"name": "' + "x" * 10_000_000 + '"}', 413),
        (b'{"name": "\xff"}', 400),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bodies_that_are_no_new_gallery_are_refused(client: TestClient, body: str | bytes, status: int) -> None:
    assert_problem(client.post("/v1/galleries", content=body, headers=JSON), status)
    assert_problem(client.get("/v1/galleries/new"), 404)


# --- query strings


def test_every_address_refuses_query_parameters_that_it_does_not_know(client: TestClient, gallery: str) -> None:
    put(client, gallery, "a", 1)
    image = {"image": picture(1)}
    asked: list[Callable[[str], Response]] = [
        lambda query: client.get(f"/v1/galleries?{query}"),
        lambda query: client.post(f"/v1/galleries?{query}", json={"name": "never"}),
        lambda query: client.get(f"{gallery}?{query}"),
        lambda query: client.patch(f"{gallery}?{query}", json={}),
        lambda query: client.delete(f"{gallery}?{query}"),
        lambda query: client.get(f"{gallery}/items?{query}"),
        lambda query: client.post(f"{gallery}/items?{query}", files=image),
        lambda query: client.put(f"{gallery}/items/a?{query}", files=image),
        lambda query: client.get(f"{gallery}/items/a?{query}"),
        lambda query: client.delete(f"{gallery}/items/a?{query}"),
        lambda query: client.post(f"{gallery}/search?{query}", files=image),
        lambda query: client.post(f"{gallery}/search-batch?{query}", files=image),
        lambda query: client.post(f"/v1/compare?{query}", files={"query": picture(1), "picture": picture(2)}),
        lambda query: client.get(f"/v1/bundles?{query}"),
        lambda query: client.get(f"/livez?{query}"),
        lambda query: client.get(f"/readyz?{query}"),
        lambda query: client.get(f"/metrics?{query}"),
    ]
    for ask in asked:
        assert "threshold" in assert_problem(ask("threshold=0.5"), 422, "invalid-request")
    assert_problem(client.get(f"{gallery}/items?limit=1&limit=2"), 422)
    assert client.get(gallery).json()["items"] == 1


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "1000000000", "5.5", "x", "", "9" * 5000])
def test_page_sizes_out_of_range_are_refused(client: TestClient, gallery: str, limit: str) -> None:
    assert_problem(client.get(f"{gallery}/items", params={"limit": limit}), 422)
    assert_problem(client.get("/v1/galleries", params={"limit": limit}), 422)


@pytest.mark.parametrize("cursor", ["", "zz", "a", "=", "LQ", "Li4", "YQBi", "4pi6", "x" * 300, "YQ==", "\ud83d"])
def test_cursors_that_did_not_come_from_here_are_refused(client: TestClient, gallery: str, cursor: str) -> None:
    address = f"{gallery}/items?cursor=" + cursor.encode("utf-8", "replace").decode()
    assert_problem(client.get(address), 422)


# --- items


def test_an_item_is_added_read_and_deleted(client: TestClient, gallery: str) -> None:
    added = put(client, gallery, "sku-1", 1, 2, label="red shoe", metadata='{"size": 42.5, "new": true, "note": null}')
    assert added.status_code == 201
    assert added.headers["location"] == f"{gallery}/items/sku-1"
    shown = added.json()["item"]
    assert added.json()["outcome"] == "created"
    assert (shown["id"], shown["label"]) == ("sku-1", "red shoe")
    assert shown["metadata"] == {"size": 42.5, "new": True, "note": None}
    assert {image["sha256"] for image in shown["images"]} == {sha256(picture(seed)).hexdigest() for seed in (1, 2)}
    read = client.get(f"{gallery}/items/sku-1")
    assert read.json() == shown
    assert read.headers["etag"] == added.headers["etag"]
    assert client.delete(f"{gallery}/items/sku-1").status_code == 204
    assert_problem(client.get(f"{gallery}/items/sku-1"), 404, "item-not-found")
    assert_problem(client.delete(f"{gallery}/items/sku-1"), 404, "item-not-found")


def test_an_item_that_is_put_again_is_replaced_and_keeps_the_ids_of_the_images_that_stay(
    client: TestClient, gallery: str
) -> None:
    first = put(client, gallery, "a", 1, 2).json()["item"]
    again = put(client, gallery, "a", 1, 2)
    assert (again.status_code, again.json()["outcome"]) == (200, "unchanged")
    assert again.json()["item"] == first
    replaced = put(client, gallery, "a", 2, 3)
    assert (replaced.status_code, replaced.json()["outcome"]) == (200, "replaced")
    ids = {image["sha256"]: image["id"] for image in first["images"]}
    kept, new = sha256(picture(2)).hexdigest(), sha256(picture(3)).hexdigest()
    after = {image["sha256"]: image["id"] for image in replaced.json()["item"]["images"]}
    assert after.keys() == {kept, new}
    assert after[kept] == ids[kept]
    assert after[new] not in ids.values()


def test_images_are_added_to_an_item_and_taken_from_it_one_by_one(client: TestClient, gallery: str) -> None:
    put(client, gallery, "a", 1)
    more = client.post(f"{gallery}/items/a/images", files=[("image", picture(seed)) for seed in (1, 2)])
    assert (more.status_code, more.json()["outcome"]) == (200, "replaced")
    first, second = (image["id"] for image in more.json()["item"]["images"])
    left = client.delete(f"{gallery}/items/a/images/{first}")
    assert [image["id"] for image in left.json()["images"]] == [second]
    assert_problem(client.delete(f"{gallery}/items/a/images/{first}"), 404, "image-not-found")
    assert_problem(client.delete(f"{gallery}/items/a/images/{second}"), 409, "last-image")
    assert_problem(client.post(f"{gallery}/items/nobody/images", files={"image": picture(1)}), 404, "item-not-found")


def test_an_item_deleted_and_added_again_under_its_id_is_another_one(client: TestClient, gallery: str) -> None:
    first = put(client, gallery, "a", 1, label="old", metadata='{"x": 1}')
    client.delete(f"{gallery}/items/a")
    second = put(client, gallery, "a", 2)
    assert second.status_code == 201
    assert (second.json()["item"]["label"], second.json()["item"]["metadata"]) == (None, {})
    assert second.headers["etag"] != first.headers["etag"]
    answer = client.post(f"{gallery}/search", files={"image": picture(1)}, data={"threshold": "0.999"}).json()
    assert answer["decision"] == "no_match"
    answer = client.post(f"{gallery}/search", files={"image": picture(2)}).json()
    assert [match["item"] for match in answer["matches"]] == ["a"]
    stale = {"If-Match": first.headers["etag"]}
    assert_problem(client.delete(f"{gallery}/items/a", headers=stale), 412, "version-mismatch")


def test_a_write_for_another_version_is_refused(client: TestClient, gallery: str) -> None:
    image = {"image": picture(9)}
    old = put(client, gallery, "a", 1).headers["etag"]
    new = put(client, gallery, "a", 2).headers["etag"]
    assert old != new
    stale, fresh = {"If-Match": old}, {"If-Match": new}
    for answer in (
        client.put(f"{gallery}/items/a", files=image, headers=stale),
        client.post(f"{gallery}/items/a/images", files=image, headers=stale),
        client.delete(f"{gallery}/items/a", headers=stale),
        client.delete(f"{gallery}/items/a/images/x", headers=stale),
        client.put(f"{gallery}/items/none", files=image, headers=fresh),
        client.put(f"{gallery}/items/a", files=image, headers={"If-None-Match": "*"}),
    ):
        assert_problem(answer, 412, "version-mismatch")
    assert client.get(f"{gallery}/items/a").headers["etag"] == new
    third = client.put(f"{gallery}/items/a", files=image, headers=fresh)
    assert third.status_code == 200
    assert client.put(f"{gallery}/items/b", files=image, headers={"If-None-Match": "*"}).status_code == 201
    assert client.delete(f"{gallery}/items/a", headers={"If-Match": third.headers["etag"]}).status_code == 204


@pytest.mark.parametrize(
    "headers",
    [
        {"If-Match": "*"},
        {"If-Match": 'W/"1-1"'},
        {"If-Match": "1-1"},
        {"If-Match": '"1-99999999999999999999"'},
        {"If-None-Match": '"1-1"'},
        {"If-Match": '"1-1"', "If-None-Match": "*"},
    ],
    ids=str,
)
def test_conditions_that_are_not_understood_are_refused_and_not_ignored(
    client: TestClient, gallery: str, headers: dict[str, str]
) -> None:
    put(client, gallery, "a", 1)
    assert_problem(client.put(f"{gallery}/items/a", files={"image": picture(2)}, headers=headers), 422)
    assert client.get(f"{gallery}/items/a").json()["images"][0]["sha256"] == sha256(picture(1)).hexdigest()


def test_an_item_under_an_id_of_ours_can_be_found_by_it(client: TestClient, gallery: str) -> None:
    added = client.post(f"{gallery}/items", files={"image": picture(1)})
    assert added.status_code == 201
    assert client.get(added.headers["location"]).json() == added.json()["item"]
    other = client.post(f"{gallery}/items", files={"image": picture(1)})
    assert other.json()["item"]["id"] != added.json()["item"]["id"]


def test_a_request_repeated_with_its_idempotency_key_adds_no_second_item(client: TestClient, gallery: str) -> None:
    def add(seed: int, key: str, **fields: str) -> Response:
        answer: Response = client.post(
            f"{gallery}/items", files={"image": picture(seed)}, data=fields, headers={"Idempotency-Key": key}
        )
        return answer

    first, again = add(1, "k1", label="x"), add(1, "k1", label="x")
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["item"] == first.json()["item"]
    assert again.headers["etag"] == first.headers["etag"]
    assert_problem(add(2, "k1", label="x"), 422, "idempotency-mismatch")
    assert_problem(add(1, "k1", label="y"), 422, "idempotency-mismatch")
    assert_problem(add(1, "k1", label="x", metadata='{"a": 1}'), 422, "idempotency-mismatch")
    assert add(1, "k2", label="x").status_code == 201
    assert client.get(gallery).json()["items"] == 2
    for key in ("", "a b", "x" * 129):
        assert_problem(add(1, key), 422)


def test_of_twenty_parallel_repeats_one_makes_the_item(client: TestClient, gallery: str) -> None:
    start = threading.Barrier(20)

    def add(_: int) -> Response:
        start.wait()
        answer: Response = client.post(
            f"{gallery}/items", files={"image": picture(3)}, headers={"Idempotency-Key": "same"}
        )
        return answer

    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(add, range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert len({answer.json()["item"]["id"] for answer in answers}) == 1
    assert client.get(gallery).json()["items"] == 1


def test_of_twenty_parallel_puts_of_one_item_none_fails_and_none_is_doubled(client: TestClient, gallery: str) -> None:
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda number: put(client, gallery, "a", number % 4), range(20)))
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert [answer.status_code for answer in answers].count(201) == 1
    shown = client.get(gallery).json()
    assert (shown["items"], shown["images"]) == (1, 1)


def test_pages_of_items_miss_none_and_double_none_while_items_come(client: TestClient, gallery: str) -> None:
    before = [f"item-{number:02}" for number in range(0, 20, 2)]
    for item in before:
        put(client, gallery, item, 1)
    seen: list[str] = []
    cursor: dict[str, str] = {}
    for number in itertools.count(1, 2):
        page = client.get(f"{gallery}/items", params={"limit": "3", **cursor}).json()
        seen += [item["id"] for item in page["items"]]
        put(client, gallery, f"item-{number:02}", 1)  # before and behind the cursor
        put(client, gallery, f"item-{19 - number % 20:02}x", 1)
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert seen == sorted(set(seen))
    assert set(before) <= set(seen)


# --- what an item brings


@pytest.mark.parametrize(
    "metadata",
    [
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1e400}',
        '{"a": {"b": 1}}',
        '{"a": [1]}',
        "[1]",
        '"text"',
        "7",
        "null",
        "{",
        "nonsense",
        '{"a": 1, "a": 1}',
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": "\\u0000"}',
        '{"": 1}',
        json.dumps({"x" * 65: 1}),
        json.dumps({f"n{number}": 1 for number in range(65)}),
        json.dumps({"a": "x" * 17_000}),
        '{"a": ' + "9" * 5_000 + "}",
        "[" * 10_000,
    ],
    ids=lambda value: value[:20],
)
def test_metadata_that_is_no_flat_object_of_finite_values_is_refused(
    client: TestClient, gallery: str, metadata: str
) -> None:
    assert "metadata" in assert_problem(put(client, gallery, "a", 1, metadata=metadata), 422, "invalid-request")
    assert client.get(gallery).json()["items"] == 0


def test_metadata_of_megabytes_or_of_a_hundred_thousand_levels_is_refused_before_it_is_read(
    client: TestClient, gallery: str
) -> None:
    for metadata in ('{"a": "' + "x" * 10_000_000 + '"}', "[" * 100_000):
        assert_problem(put(client, gallery, "a", 1, metadata=metadata), 400, "bad-request")
    assert client.get(gallery).json()["items"] == 0


def test_metadata_comes_back_as_it_was_sent(client: TestClient, gallery: str) -> None:
    sent = {
        "a": 1,
        "b": 1.0,
        "c": True,
        "d": None,
        "e": "=cmd()",
        "f": "<img onerror=x>",
        "g": -(2**70),
        "h": "é\u202e",
    }
    item = put(client, gallery, "a", 1, metadata=json.dumps(sent)).json()["item"]
    assert json.dumps(item["metadata"], sort_keys=True) == json.dumps(sent, sort_keys=True)
    assert client.get(f"{gallery}/items/a").json() == item


@pytest.mark.parametrize("label", ["x" * 257, "a\0b"])
def test_labels_that_cannot_be_stored_are_refused(client: TestClient, gallery: str, label: str) -> None:
    assert "label" in assert_problem(put(client, gallery, "a", 1, label=label), 422)


def test_fields_that_are_unknown_doubled_or_missing_are_refused(client: TestClient, gallery: str) -> None:
    image = ("image", picture(1))
    address = f"{gallery}/items/a"
    assert "surprise" in assert_problem(put(client, gallery, "a", 1, surprise="1"), 422)
    assert "label" in assert_problem(client.put(address, files=[image], data={"label": ["x", "y"]}), 422)
    assert "image" in assert_problem(client.put(address, data={"label": "x"}), 422)
    assert "image" in assert_problem(client.put(address, data={"image": "text"}), 422)
    assert "metadata" in assert_problem(client.put(address, files=[image, ("metadata", b"{}")]), 422)
    assert "label" in assert_problem(client.put(address, files=[image, ("label", b"x")]), 422)
    assert_problem(client.put(address, files=[image, ("other", b"x")]), 422)
    assert_problem(client.put(address, files=[image, ("a\nb\x1b[31m", b"x")]), 422)
    assert client.get(gallery).json()["items"] == 0


def test_an_item_takes_a_hundred_images_and_no_more(client: TestClient, gallery: str) -> None:
    hundred = [("image", picture(seed, side=24)) for seed in range(100)]
    assert_problem(client.put(f"{gallery}/items/a", files=[*hundred, ("image", picture(101))]), 422)
    assert_problem(client.put(f"{gallery}/items/a", files=[*hundred, *hundred]), 400)
    assert client.put(f"{gallery}/items/a", files=hundred).status_code == 201
    more = client.post(f"{gallery}/items/a/images", files={"image": picture(101)})
    assert_problem(more, 409, "too-many-images")
    assert client.get(gallery).json()["images"] == 100


def test_one_bad_picture_refuses_the_whole_write(client: TestClient, gallery: str) -> None:
    files = [("image", picture(1)), ("image", b"no picture"), ("image", picture(2))]
    assert_problem(client.put(f"{gallery}/items/a", files=files), 415, "unsupported-image")
    assert client.get(gallery).json()["items"] == 0


# --- pictures


def test_a_kept_picture_is_handed_out_anew_without_its_metadata(client: TestClient, gallery: str) -> None:
    exif = Image.Exif()
    exif[0x010E] = "secret place"
    raw = BytesIO()
    Image.open(BytesIO(picture(4, side=700))).convert("RGB").save(raw, "JPEG", exif=exif, comment=b"secret note")
    sent = raw.getvalue() + b"<script>alert(1)</script>"
    added = client.put(f"{gallery}/items/a", files={"image": ("../../etc/passwd", sent, "text/html")}).json()
    url = added["item"]["images"][0]["url"]
    answer = client.get(url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    assert not any(secret in answer.content for secret in (b"secret", b"script", b"passwd"))
    assert Image.open(BytesIO(answer.content)).size == (700, 700)
    thumb = client.get(f"{url}?size=thumb")
    assert max(Image.open(BytesIO(thumb.content)).size) == 320
    assert_problem(client.get(f"{url}?size=huge"), 422)
    other = put(client, gallery, "b", 5).json()["item"]["images"][0]["id"]
    client.post("/v1/galleries", json={"name": "neighbour"})
    assert_problem(client.get(f"/v1/galleries/neighbour/images/{other}"), 404, "image-not-found")


def test_a_gallery_that_keeps_no_pictures_finds_them_and_shows_none(
    client: TestClient, service: Service, gallery: str
) -> None:
    before = len(list(service.store.blobs.keys_older_than(-1)))
    client.post("/v1/galleries", json={"name": "forgetful", "keep": "none"})
    added = put(client, "/v1/galleries/forgetful", "a", 1).json()["item"]
    assert len(list(service.store.blobs.keys_older_than(-1))) == before
    assert added["images"][0]["url"] is None
    image = added["images"][0]["id"]
    assert_problem(client.get(f"/v1/galleries/forgetful/images/{image}"), 404, "picture-not-kept")
    found = client.post("/v1/galleries/forgetful/search", files={"image": edited(picture(1))}).json()
    assert [match["image"] for match in found["matches"]] == [image]


def test_a_deleted_items_picture_is_gone_from_the_disk(client: TestClient, service: Service, gallery: str) -> None:
    before = set(service.store.blobs.keys_older_than(-1))
    images = put(client, gallery, "a", 1, 2).json()["item"]["images"]
    url = next(image["url"] for image in images if image["sha256"] == sha256(picture(1)).hexdigest())
    assert len(set(service.store.blobs.keys_older_than(-1)) - before) == 2
    put(client, gallery, "a", 2)
    assert len(set(service.store.blobs.keys_older_than(-1)) - before) == 1
    assert_problem(client.get(url), 404, "image-not-found")
    client.delete(f"{gallery}/items/a")
    assert set(service.store.blobs.keys_older_than(-1)) == before


# --- the other database


def test_postgresql_answers_as_sqlite_does(tmp_path: Path, bundle: Path, postgres_url: str) -> None:
    with TestClient(create_app(open_here(tmp_path / "data", bundle, database=postgres_url))) as client:
        client.post("/v1/galleries", json={"name": "g"})
        gallery = "/v1/galleries/g"
        text = json.dumps({"a": "é\u202e", "b": -(2**70), "c": 0.1})
        added = put(client, gallery, "Zebra", 1, label="x", metadata=text)
        assert added.status_code == 201
        assert added.json()["item"]["metadata"] == json.loads(text)
        for item in ("apple", "B", "a.1", "a-1"):
            put(client, gallery, item, 2)
        listed = client.get(f"{gallery}/items?limit=3").json()
        rest = client.get(f"{gallery}/items", params={"cursor": listed["next_cursor"]}).json()
        ids = [item["id"] for item in listed["items"] + rest["items"]]
        assert ids == sorted(ids)
        assert len(ids) == 5
        assert_problem(put(client, gallery, "x", 1, label="a\0"), 422)
        assert_problem(put(client, gallery, "x", 1, metadata='{"a": "\\u0000"}'), 422)
        stale = {"If-Match": '"1-999999999999999999"'}
        assert_problem(client.delete(f"{gallery}/items/B", headers=stale), 412)
        key = {"Idempotency-Key": "same"}
        with ThreadPoolExecutor(8) as threads:
            adds = list(
                threads.map(
                    lambda _: client.post(f"{gallery}/items", files={"image": picture(3)}, headers=key), range(8)
                )
            )
        assert sorted(answer.status_code for answer in adds) == [200] * 7 + [201]
        found = client.post(f"{gallery}/search", files={"image": edited(picture(1))}).json()
        assert [match["item"] for match in found["matches"]] == ["Zebra"]
        client.delete(f"{gallery}/items/Zebra")
        assert client.post(f"{gallery}/search", files={"image": picture(1)}).json()["decision"] == "no_match"
        assert client.delete(gallery).status_code == 204


def test_metadata_that_python_holds_for_equal_is_a_change(client: TestClient, gallery: str) -> None:
    for value in ("true", "1", "1.0", "false", "0"):
        answer = put(client, gallery, "typed", 1, metadata=f'{{"a": {value}}}')
        assert answer.json()["outcome"] in ("created", "replaced")
        assert json.dumps(answer.json()["item"]["metadata"]) == f'{{"a": {value}}}'
    assert put(client, gallery, "typed", 1, metadata='{"a": 0}').json()["outcome"] == "unchanged"


def test_a_json_body_of_megabytes_is_refused(client: TestClient) -> None:
    assert_problem(client.post("/v1/galleries", json={"name": "x" * 100_000}), 413)

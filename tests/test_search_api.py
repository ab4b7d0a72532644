import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from httpx2 import Response
from pydantic import BaseModel
from starlette.testclient import TestClient

from app.answers import BatchAnswer, CompareAnswer, SearchAnswer
from app.problems import Problem
from app.routes.galleries import GalleryView
from app.routes.items import Written
from app.service import Service
from roadmatch.gallery import galleries
from tests.bundles import DEFAULT_RULE, edited, picture
from tests.hostile_pictures import hostile_pictures
from tests.test_api import assert_problem, put

NUMBERS = itertools.count()


@pytest.fixture
def gallery(client: TestClient) -> str:
    """An empty gallery's address."""
    name = f"s{next(NUMBERS)}"
    assert client.post("/v1/galleries", json={"name": name}).status_code == 201
    return f"/v1/galleries/{name}"


def search(client: TestClient, gallery: str, data: bytes, **fields: str) -> Response:
    answer: Response = client.post(f"{gallery}/search", files={"image": data}, data=fields)
    return answer


# --- search


def test_a_copy_is_a_match_and_another_picture_is_none(client: TestClient, gallery: str) -> None:
    for number in range(5):
        put(client, gallery, f"i{number}", number)
    found = search(client, gallery, edited(picture(3), quality=60)).json()
    assert found["decision"] == "match"
    assert [match["item"] for match in found["matches"]] == ["i3"]
    assert len(found["near_misses"]) == 4
    assert found["best_score"] == found["matches"][0]["score"]
    assert found["operating_point"] == DEFAULT_RULE
    other = search(client, gallery, picture(77)).json()
    assert other["decision"] == "no_match"
    assert other["matches"] == []
    assert len(other["near_misses"]) == 5
    scores = [hit["score"] for hit in other["near_misses"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == other["best_score"] < other["threshold"]
    for hit in found["matches"] + found["near_misses"]:
        assert hit["margin"] == pytest.approx(hit["score"] - found["threshold"], abs=1e-9)
    assert (found["gallery"], found["gallery_size"], found["seq"]) == (gallery.rsplit("/", 1)[1], 5, 5)


def test_an_item_scores_as_its_best_image_does(client: TestClient, gallery: str) -> None:
    images = put(client, gallery, "a", 1, 2, 3).json()["item"]["images"]
    put(client, gallery, "b", 4)
    for seed in (1, 2, 3):
        found = search(client, gallery, picture(seed)).json()
        best = found["matches"][0]
        assert best["item"] == "a"
        assert best["similarity"] == pytest.approx(1.0, abs=1e-6)
        assert best["image"] in {image["id"] for image in images}
    assert len({search(client, gallery, picture(seed)).json()["matches"][0]["image"] for seed in (1, 2, 3)}) == 3
    shown = found["matches"] + found["near_misses"]
    assert sorted(hit["item"] for hit in shown) == ["a", "b"]


def test_top_k_counts_matches_and_near_misses_together(client: TestClient, gallery: str) -> None:
    for number in range(6):
        put(client, gallery, f"same-{number}", 1)
        put(client, gallery, f"other-{number}", number + 20)
    found = search(client, gallery, picture(1), top_k="4").json()
    assert [hit["item"] for hit in found["matches"]] == [f"same-{number}" for number in range(4)]
    assert (found["near_misses"], found["matches_truncated"]) == ([], True)
    found = search(client, gallery, picture(1), top_k="8").json()
    assert (len(found["matches"]), len(found["near_misses"]), found["matches_truncated"]) == (6, 2, False)
    found = search(client, gallery, picture(1), top_k="1000").json()
    assert len(found["matches"]) + len(found["near_misses"]) == 12


@pytest.mark.parametrize("top_k", ["0", "-1", "1001", "1000000000", "5.5", "1e1", "five", "9" * 5000, "nan"])
def test_top_k_out_of_range_is_refused(client: TestClient, gallery: str, top_k: str) -> None:
    assert "top_k" in assert_problem(search(client, gallery, picture(1), top_k=top_k), 422, "invalid-request")


@pytest.mark.parametrize(
    "threshold", ["nan", "NaN", "inf", "-inf", "Infinity", "1e400", "-1", "1.0001", "0,5", "0.5x", "0x1", "[]", "null"]
)
def test_thresholds_that_are_no_number_in_range_are_refused(client: TestClient, gallery: str, threshold: str) -> None:
    for address in ("search", "search-batch"):
        answer = client.post(f"{gallery}/{address}", files={"image": picture(1)}, data={"threshold": threshold})
        assert "threshold" in assert_problem(answer, 422, "invalid-request")
    pair = {"query": picture(1), "picture": picture(2)}
    assert_problem(client.post("/v1/compare", files=pair, data={"threshold": threshold}), 422, "invalid-request")


def test_rules_that_are_unknown_or_unsupported_are_refused_with_the_mend(client: TestClient, gallery: str) -> None:
    pair = {"query": picture(1), "picture": picture(2)}
    for rule, code, mend in (
        ("false_match_rate<=0.0001", "unsupported-rule", "0.006"),
        ("false_match_rate<=0.02", "unknown-rule", DEFAULT_RULE),
        ("'; drop table", "unknown-rule", "max_f1"),
        ("\ud83d\ude00\n\n", "unknown-rule", "max_f1"),
    ):
        fields = {"rule": rule.encode("utf-16", "surrogatepass").decode("utf-16")}
        for answer in (
            client.post(f"{gallery}/search", files={"image": picture(1)}, data=fields),
            client.post(f"{gallery}/search-batch", files={"image": picture(1)}, data=fields),
            client.post("/v1/compare", files=pair, data=fields),
            client.post("/v1/compare", files=pair, data=fields | {"gallery": gallery.rsplit("/", 1)[1]}),
            client.patch(gallery, json=fields),
            client.post("/v1/galleries", json={"name": "never", **fields}),
        ):
            assert mend in assert_problem(answer, 422, code)


def test_searches_with_fields_that_do_not_fit_are_refused(client: TestClient, gallery: str) -> None:
    one, address = ("image", picture(1)), f"{gallery}/search"
    both = {"rule": DEFAULT_RULE, "threshold": "0.5"}
    assert "not both" in assert_problem(search(client, gallery, picture(1), **both), 422)
    assert "search-batch" in assert_problem(client.post(address, files=[one, one]), 422)
    assert "top_k" in assert_problem(client.post(address, files=[one], data={"top_k": ["1", "2"]}), 422)
    assert "image" in assert_problem(client.post(address, data={"top_k": "1"}), 422)
    assert "image" in assert_problem(client.post(address, data={"image": "text"}), 422)
    assert "surprise" in assert_problem(search(client, gallery, picture(1), surprise="x"), 422)
    assert "rule" in assert_problem(client.post(address, files=[one, ("rule", b"max_f1")]), 422)
    assert_problem(client.post(f"{gallery}/search-batch", data={"top_k": "1"}), 422)
    assert_problem(client.post("/v1/compare", files={"query": picture(1)}), 422)
    pair = [("query", picture(1)), ("picture", picture(2))]
    assert "query" in assert_problem(client.post("/v1/compare", files=[*pair, ("query", picture(3))]), 422)
    places = {"gallery": "g", "bundle": "b"}
    assert "not both" in assert_problem(client.post("/v1/compare", files=pair, data=places), 422)
    assert_problem(client.post("/v1/compare", files=pair, data={"gallery": "nowhere"}), 404, "gallery-not-found")
    assert_problem(client.post("/v1/compare", files=pair, data={"gallery": "../x"}), 422)
    assert_problem(client.post("/v1/compare", files=pair, data={"bundle": "hf-hub:a/b"}), 404, "bundle-not-found")


def test_a_batch_answers_every_picture_in_its_place(client: TestClient, gallery: str) -> None:
    for number in range(4):
        put(client, gallery, f"i{number}", number)
    sent = [picture(2), b"no picture", picture(0), b"", picture(99)]
    answers = client.post(f"{gallery}/search-batch", files=[("image", data) for data in sent]).json()["answers"]
    assert [answer.get("decision") for answer in answers] == ["match", None, "match", None, "no_match"]
    assert [answer["matches"][0]["item"] for answer in (answers[0], answers[2])] == ["i2", "i0"]
    assert (answers[1]["status"], answers[1]["code"]) == (415, "unsupported-image")
    assert (answers[3]["status"], answers[3]["code"]) == (422, "unreadable-image")
    assert len({answer["seq"] for answer in answers if "seq" in answer}) == 1
    for data, answer in zip(sent, answers, strict=True):
        assert search(client, gallery, data).json() == answer
    many = [("image", picture(1, side=24))] * 65
    assert client.post(f"{gallery}/search-batch", files=many[:64]).status_code == 200
    assert_problem(client.post(f"{gallery}/search-batch", files=many), 422)


def test_a_pair_is_compared_as_a_search_would(client: TestClient, gallery: str) -> None:
    pair = {"query": edited(picture(1)), "picture": picture(1)}
    alone = client.post("/v1/compare", files=pair).json()
    assert (alone["decision"], alone["gallery"], alone["gallery_size"]) == ("match", None, 1)
    assert alone["stated_rate"]["here"]["gallery_images"] == 1
    for number in range(3):
        put(client, gallery, f"i{number}", number)
    within = client.post("/v1/compare", files=pair, data={"gallery": gallery.rsplit("/", 1)[1]}).json()
    assert within["threshold"] > alone["threshold"]
    assert within["threshold"] == search(client, gallery, picture(1)).json()["threshold"]
    assert client.post("/v1/compare", files=pair | {"picture": picture(5)}).json()["decision"] == "no_match"
    assert_problem(client.post("/v1/compare", files=pair | {"query": b"x"}), 415, "unsupported-image")


def test_parallel_searches_answer_as_lone_ones_do(client: TestClient, gallery: str) -> None:
    for number in range(6):
        put(client, gallery, f"i{number}", number)
    alone = [search(client, gallery, edited(picture(number))).json() for number in range(6)]
    with ThreadPoolExecutor(12) as threads:
        together = list(
            threads.map(lambda number: search(client, gallery, edited(picture(number % 6))).json(), range(48))
        )
    for number, answer in enumerate(together):
        assert answer == alone[number % 6]


# --- hostile pictures


def test_hostile_pictures_are_refused_as_they_should_be_and_leave_nothing_behind(
    client: TestClient, service: Service, gallery: str
) -> None:
    files = hostile_pictures()
    put(client, gallery, "anchor", 1)
    kept = set(service.store.blobs.keys_older_than(-1))
    for number, (name, hostile) in enumerate(files.items()):
        if hostile.expect == "ok":
            continue
        started = time.process_time()
        answer = client.put(f"{gallery}/items/h{number}", files={"image": (name, hostile.data)})
        assert time.process_time() - started <= 2.0, name
        assert_problem(answer, hostile.expect)
        assert_problem(search(client, gallery, hostile.data), hostile.expect)
    shown = client.get(gallery).json()
    assert (shown["items"], shown["seq"]) == (1, 1)
    assert set(service.store.blobs.keys_older_than(-1)) == kept


def test_odd_but_sound_pictures_are_items_with_finite_unit_embeddings(
    client: TestClient, service: Service, gallery: str
) -> None:
    sound = {name: hostile.data for name, hostile in hostile_pictures().items() if hostile.expect == "ok"}
    assert len(sound) > 30
    items = {f"i{number}": name for number, name in enumerate(sound)}
    for item, name in items.items():
        started = time.process_time()
        added = client.put(f"{gallery}/items/{item}", files={"image": (name, sound[name])})
        assert time.process_time() - started <= 2.0, name
        assert added.status_code == 201, (name, added.text)
        found = search(client, gallery, sound[name], top_k="1000").json()  # many show the same photo
        similarities = {hit["item"]: hit["similarity"] for hit in found["matches"] + found["near_misses"]}
        assert similarities[item] == pytest.approx(1.0, abs=1e-6), name
    generation = service.generation(galleries.get(service.database, gallery.rsplit("/", 1)[1]))
    vectors = generation.vectors[:, : generation.dimension].astype(np.float64)
    assert len(vectors) == len(sound)
    assert np.isfinite(generation.vectors).all()
    assert np.isfinite(generation.b).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    for listed in client.get(f"{gallery}/items?limit=1000").json()["items"]:
        picture_answer = client.get(listed["images"][0]["url"] + "?size=thumb")
        assert picture_answer.status_code == 200, items[listed["id"]]


@pytest.mark.parametrize("name", sorted(hostile_pictures()))
def test_no_picture_takes_more_than_two_seconds(client: TestClient, gallery: str, name: str) -> None:
    """CPU seconds of the whole process, for one search."""
    data = hostile_pictures()[name].data
    started = time.process_time()
    search(client, gallery, data)
    assert time.process_time() - started <= 2.0


# --- documents


def test_the_openapi_document_is_whole(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"].items()
    operations = [(path, method, operation) for path, methods in paths for method, operation in methods.items()]
    assert len(operations) >= 18
    names = [operation["operationId"] for *_, operation in operations]
    assert len(set(names)) == len(names)
    assert {"search_gallery", "put_item", "create_gallery", "compare_pictures", "get_image"} <= set(names)
    for path, method, operation in operations:
        assert {"422", "500"} <= set(operation["responses"])
        assert operation.get("description") or operation.get("summary"), path
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                content = answer["content"]
                assert set(content) == {"application/problem+json"}, (path, method, status)
                assert content["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}
        if path.startswith("/v1/galleries/"):
            assert {"404", "422", "503"} <= set(operation["responses"]), (path, method)
    assert _broken_references(document) == []


def _broken_references(document: Any) -> list[str]:
    broken = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                target: Any = document
                for part in reference.removeprefix("#/").split("/"):
                    target = target.get(part, {}) if isinstance(target, dict) else {}
                if not target:
                    broken.append(reference)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    return broken


def test_searches_and_items_have_examples_and_the_examples_are_true_to_their_schemas(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    models: dict[tuple[str, str], type[BaseModel]] = {
        ("/v1/galleries/{gallery}/search", "post"): SearchAnswer,
        ("/v1/galleries/{gallery}/items/{item}", "put"): Written,
        ("/v1/galleries/{gallery}/items", "post"): Written,
        ("/v1/galleries/{gallery}/search-batch", "post"): BatchAnswer,
        ("/v1/compare", "post"): CompareAnswer,
        ("/v1/galleries", "post"): GalleryView,
    }
    for (path, method), model in models.items():
        operation = document["paths"][path][method]
        request = next(iter(operation["requestBody"]["content"].values()))
        asked = _example(document, request)
        assert asked, path
        answer = next(answer for status, answer in sorted(operation["responses"].items()) if status in ("200", "201"))
        shown = _example(document, answer["content"]["application/json"])
        assert model.model_validate(shown), path
        assert set(shown) == set(model.model_fields), path
    Problem.model_validate(_example(document, {"schema": {"$ref": "#/components/schemas/Problem"}}))


def _example(document: Any, content: Any) -> Any:
    if "example" in content:
        return content["example"]
    schema = content["schema"]
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema["examples"][0]


def test_health_bundles_and_metrics_answer(client: TestClient, service: Service, gallery: str) -> None:
    assert client.get("/livez").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok"}
    [shown] = client.get("/v1/bundles").json()["bundles"]
    assert shown["id"] == service.default_bundle
    assert [point["rule"] for point in shown["operating_points"] if not point["supported"]] == [
        "false_match_rate<=0.0001"
    ]
    search(client, gallery, picture(1))
    text = client.get("/metrics").text
    assert 'roadmatch_requests_total{method="POST",route="/v1/galleries/{gallery}/search",status="200"}' in text
    assert 'roadmatch_decisions_total{decision="no_match"}' in text
    assert gallery.rsplit("/", 1)[1] + '"' not in text
    for odd in range(3):
        client.request(f"ODD{odd}", "/livez")
    assert "ODD" not in client.get("/metrics").text


# --- galleries that another process changes


def test_a_gallery_that_another_process_deletes_and_makes_anew_is_searched_as_it_is(
    client: TestClient, service: Service, gallery: str
) -> None:
    name = gallery.rsplit("/", 1)[1]
    put(client, gallery, "old", 1)
    assert search(client, gallery, picture(1)).json()["matches"][0]["item"] == "old"
    known = galleries.get(service.database, name)
    galleries.delete(service.database, service.store.blobs, name)
    assert_problem(search(client, gallery, picture(1)), 404, "gallery-not-found")
    galleries.create(service.database, name, bundle=known.bundle, rule=known.rule, keep=known.keep)
    put(client, gallery, "new", 2)
    found = search(client, gallery, picture(2)).json()
    assert ([match["item"] for match in found["matches"]], found["gallery_size"]) == (["new"], 1)
    galleries.delete(service.database, service.store.blobs, name)
    galleries.create(service.database, name, bundle=known.bundle, rule=known.rule, keep=known.keep)
    assert search(client, gallery, picture(2)).json()["gallery_size"] == 0


def test_a_gallery_of_a_bundle_that_another_process_brought_is_refused_by_name(
    client: TestClient, service: Service, gallery: str
) -> None:
    name = gallery.rsplit("/", 1)[1]
    search(client, gallery, picture(1))
    known = galleries.get(service.database, name)
    galleries.delete(service.database, service.store.blobs, name)
    galleries.create(service.database, name, bundle="other@0123456789ab", rule=known.rule, keep=known.keep)
    assert "other@0123456789ab" in search(client, gallery, picture(1)).json()["detail"]

import importlib.util
import re
import time
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from starlette.testclient import TestClient

from app.main import create_app
from app.service import Service
from roadmatch import bundle as bundles
from roadmatch.bundle import Bundle, default_bundle_folder
from roadmatch.gallery import galleries, items
from roadmatch.gallery.items import NewImage
from roadmatch.operating_points import OperatingPoint, OperatingPoints
from roadmatch.scoring import similarity
from tests.bundles import DEFAULT_RULE, SCORE, edited, operating_points, picture, tiny_bundle
from tests.service import open_here
from tests.test_api import assert_problem, put

STEP = 1e-6
PAIRS = [(1, 50), (3, 60), (2, 45)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="module")
def service(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Service:
    return open_here(tmp_path_factory.mktemp("data"), bundle.folder)


def shown(answer: Any) -> list[tuple[str, float, float, float, str]]:
    """What an answer says of each item."""
    decided = [(hit, "match") for hit in answer["matches"]] + [(hit, "no_match") for hit in answer["near_misses"]]
    return [(hit["item"], hit["similarity"], hit["score"], hit["margin"], said) for hit, said in decided]


def ask_all(client: TestClient, gallery: str, query: bytes, kept: bytes, **fields: str) -> list[tuple[Any, ...]]:
    """(similarity, score, margin, decision, threshold) of the pair in search, search-batch and compare."""
    files = {"image": query}
    alone = client.post(f"/v1/galleries/{gallery}/search", files=files, data=fields).json()
    batch = client.post(
        f"/v1/galleries/{gallery}/search-batch", files=[("image", picture(70)), ("image", query)], data=fields
    ).json()["answers"][1]
    pair = {"query": query, "picture": kept}
    compared = client.post("/v1/compare", files=pair, data=fields | {"gallery": gallery}).json()
    told = [
        (*next((*hit[1:], answer["threshold"]) for hit in shown(answer) if hit[0] == "kept"),)
        for answer in (alone, batch)
    ]
    names = ("similarity", "score", "margin", "decision", "threshold")
    return [*told, tuple(compared[name] for name in names)]


@pytest.fixture
def pairs(client: TestClient, service: Service) -> Iterator[list[tuple[str, bytes, bytes]]]:
    """Galleries of one kept picture among others, each with the query that is asked there."""
    made = []
    for seed, quality in PAIRS:
        name = f"pair{seed}"
        client.post("/v1/galleries", json={"name": name})
        put(client, f"/v1/galleries/{name}", "kept", seed)
        put(client, f"/v1/galleries/{name}", "other", 80, 81)
        made.append((name, edited(picture(seed), quality=quality), picture(seed)))
    yield made
    for name, *_ in made:
        client.delete(f"/v1/galleries/{name}")


def test_a_pair_has_one_similarity_score_and_decision_everywhere(
    client: TestClient, pairs: list[tuple[str, bytes, bytes]]
) -> None:
    for gallery, query, kept in pairs:
        for fields in ({}, {"rule": "max_f1"}, {"threshold": "0.999"}, {"threshold": "-0.5"}):
            told = ask_all(client, gallery, query, kept, **fields)
            assert told[0] == told[1] == told[2]
            similar, score, margin, decision, threshold = told[0]
            assert (decision == "match") == (score >= threshold)
            assert margin == pytest.approx(score - threshold, abs=1e-9)
            assert all(round(number, 6) == number for number in (similar, score, threshold))


def test_a_millionth_around_an_own_threshold_is_decided_alike_everywhere(
    client: TestClient, pairs: list[tuple[str, bytes, bytes]]
) -> None:
    for gallery, query, kept in pairs:
        score = ask_all(client, gallery, query, kept)[0][1]
        for threshold, decision in ((score - STEP, "match"), (score, "match"), (score + STEP, "no_match")):
            told = ask_all(client, gallery, query, kept, threshold=f"{threshold:.6f}")
            assert told[0] == told[1] == told[2]
            assert told[0][3] == decision
        # thresholds are rounded as scores are, so a digit more changes nothing
        assert {told[3] for told in ask_all(client, gallery, query, kept, threshold=f"{score + 4e-7:.7f}")} == {"match"}


def test_a_millionth_around_the_threshold_of_a_rule_is_decided_alike_everywhere(
    client: TestClient, pairs: list[tuple[str, bytes, bytes]], bundle: Bundle, tmp_path: Path
) -> None:
    gallery, query, kept = pairs[0]
    score = ask_all(client, gallery, query, kept)[0][1]
    given = bundle.operating_points
    assert given is not None
    rules = {"below": score - STEP, "at": score, "above": score + STEP}
    points = [_with_threshold(given.points[0], rule, round(at, 6)) for rule, at in rules.items()]
    changed = given.model_copy(update={"points": (*given.points, *points)})
    special = bundles.fitted(
        bundle,
        tmp_path / "special",
        background=bundle.background,
        operating_points=OperatingPoints.model_validate(changed.model_dump()),
    )
    with TestClient(create_app(open_here(tmp_path / "data", special.folder))) as own:
        own.post("/v1/galleries", json={"name": "g"})
        put(own, "/v1/galleries/g", "kept", PAIRS[0][0])
        for rule, decision in (("below", "match"), ("at", "match"), ("above", "no_match")):
            told = ask_all(own, "g", query, kept, rule=rule)
            assert told[0] == told[1] == told[2]
            assert told[0][1] == score
            assert told[0][3] == decision


def _with_threshold(point: OperatingPoint, rule: str, threshold: float) -> OperatingPoint:
    return point.model_copy(update={"rule": rule, "thresholds": (threshold,) * 21})


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_items_a_millionth_around_the_threshold_lie_on_its_right_side(
    kind: str, bundle: Bundle, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    database = str(request.getfixturevalue("postgres_url")) if kind == "postgres" else ""
    service = open_here(tmp_path / "data", bundle.folder, database=database)
    with TestClient(create_app(service)) as client:
        client.post("/v1/galleries", json={"name": "ties"})
        gallery = galleries.get(service.database, "ties")
        point = service.points(gallery.bundle).point(gallery.rule)
        query = service.encoder(gallery.bundle).encode(picture(1))
        threshold = point.threshold(60).value
        expected = {}
        for number in range(60):
            vector = service.encoder(gallery.bundle).encode(picture(number % 20 + 100)).vector
            wanted = round(threshold + (number % 3 - 1) * STEP, 6)
            alike = float(similarity(query.vector, vector[None])[0])
            b = (alike - SCORE.beta * query.b - wanted) / SCORE.gamma
            image = NewImage(b"x", sha256(bytes([number])).hexdigest(), "PNG", 9, 9, vector, b)
            items.put(service.store, gallery, f"i{number:02}", label=None, metadata={}, images=[image])
            expected[f"i{number:02}"] = (wanted, "match" if number % 3 else "no_match")
        files = {"image": picture(1)}
        alone = client.post("/v1/galleries/ties/search", files=files, data={"top_k": "100"}).json()
        assert alone["threshold"] == threshold
        assert {item: (score, said) for item, _, score, _, said in shown(alone)} == expected
        assert (len(alone["matches"]), len(alone["near_misses"])) == (40, 20)
        batch = client.post("/v1/galleries/ties/search-batch", files=files, data={"top_k": "100"}).json()
        again = client.post("/v1/galleries/ties/search", files=files, data={"top_k": "100"}).json()
        assert batch["answers"] in ([alone], [again])  # the self-check may come in between
        for top_k in (1, 20, 40, 41):
            part = client.post("/v1/galleries/ties/search", files=files, data={"top_k": str(top_k)}).json()
            assert shown(part) == shown(alone)[:top_k]
            assert part["matches_truncated"] == (top_k < 40)


# --- what stands behind an answer


def test_an_own_threshold_has_no_operating_point_and_no_rate(client: TestClient) -> None:
    client.post("/v1/galleries", json={"name": "own"})
    put(client, "/v1/galleries/own", "a", 1)
    own, pair = {"threshold": "0.5"}, {"query": picture(1), "picture": picture(2)}
    alone = client.post("/v1/galleries/own/search", files={"image": picture(1)}, data=own).json()
    batch = client.post("/v1/galleries/own/search-batch", files={"image": picture(1)}, data=own).json()["answers"][0]
    compared = client.post("/v1/compare", files=pair, data=own).json()
    within = client.post("/v1/compare", files=pair, data=own | {"gallery": "own"}).json()
    for answer in (alone, batch, compared, within):
        assert answer["threshold"] == 0.5
        assert answer["operating_point"] is None
        assert answer["stated_rate"] is None
        assert answer["calibration"] == "not_checked"


def test_the_promise_says_in_words_what_the_figures_of_the_answer_are(client: TestClient, service: Service) -> None:
    client.post("/v1/galleries", json={"name": "words"})
    for number in range(5):
        put(client, "/v1/galleries/words", f"i{number}", number)
    for rule in (DEFAULT_RULE, "max_f1"):
        answer = client.post("/v1/galleries/words/search", files={"image": picture(1)}, data={"rule": rule}).json()
        assert_words(answer["stated_rate"])
        assert answer["operating_point"] == rule
        assert answer["stated_rate"]["here"]["gallery_images"] == answer["gallery_size"] == 5
        point = service.points(answer["bundle"]).point(rule)
        assert answer["threshold"] == point.threshold(8).value
    assert_words(client.get("/v1/galleries/words").json()["stated_rate"])


def assert_words(stated: Any) -> None:
    evidence, here, words = stated["evidence"], stated["here"], stated["promise"]
    false = evidence["false_match_rate"]
    percents = [float(number) for number in re.findall(r"([\d.]+) %(?! of pictures)", words.replace("(95 %", "("))]
    told = [false["value"], false["low"], false["high"], evidence["recall"]["value"]]
    told += [here["expected_false_match_rate"], here["expected_recall"]]
    told += [] if here["self_checked_at_most"] is None else [here["self_checked_at_most"]]
    assert len(percents) == len(told), words
    for percent, share in zip(percents, told, strict=True):
        assert percent / 100 == pytest.approx(share, rel=0.06, abs=1e-9), words
    for text in (evidence["what"], f"{evidence['pictures']} pictures", f"gallery of {evidence['gallery_size']}"):
        assert text in words
    assert f"Here, with {here['gallery_images']} image" in words
    assert words.endswith("Other kinds of pictures need their own calibration.")


def test_what_is_expected_follows_the_size_of_the_gallery(client: TestClient) -> None:
    client.post("/v1/galleries", json={"name": "grows"})
    seen = []
    for number in range(9):
        put(client, "/v1/galleries/grows", f"i{number}", number)
        answer = client.post("/v1/galleries/grows/search", files={"image": picture(1)}).json()
        seen.append((answer["gallery_size"], answer["threshold"]))
    assert [size for size, _ in seen] == list(range(1, 10))
    thresholds = [threshold for _, threshold in seen]
    assert thresholds == sorted(thresholds)
    assert len(set(thresholds)) == 5  # 1, 2, 4, 8 and 16: not one for every size
    assert thresholds[4] == thresholds[7]


# --- the gallery's own images


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, TestClient]]:
    """The bundle that comes with Roadmatch."""
    service = open_here(tmp_path_factory.mktemp("data"), default_bundle_folder())
    with TestClient(create_app(service)) as client:
        yield service, client


def look_alike(number: int) -> bytes:
    """A badge: the same drawing with another small detail."""
    image = Image.new("RGB", (128, 128), (250, 250, 245))
    draw = ImageDraw.Draw(image)
    draw.ellipse((16, 16, 112, 112), fill=(240, 200, 40), outline=(90, 60, 0), width=4)
    draw.ellipse((40 + number % 8, 44, 50 + number % 8, 56), fill=(20, 20, 20))
    draw.ellipse((78, 44 + number // 8, 88, 56 + number // 8), fill=(20, 20, 20))
    return as_png(image)


def as_png(image: Image.Image) -> bytes:
    target = BytesIO()
    image.save(target, "PNG")
    return target.getvalue()


def checked(service: Service, client: TestClient, gallery: str) -> Any:
    """The gallery as it is shown once it is checked."""
    for _ in range(50):
        client.get(gallery)  # a rule is checked once somebody asks for it
        service.check_galleries()
        found = client.get(gallery).json()
        here = found["stated_rate"]["here"]
        if found["calibration"] != "not_checked" and here["self_checked_false_match_rate"] is not None:
            return found
        time.sleep(0.1)
    raise AssertionError(f"never checked: {found}")


def filled(client: TestClient, name: str, pictures: list[bytes], **fields: str) -> str:
    client.post("/v1/galleries", json={"name": name})
    for number, data in enumerate(pictures):
        answer = client.put(f"/v1/galleries/{name}/items/i{number}", files={"image": data}, data=fields)
        assert answer.status_code == 201
    return f"/v1/galleries/{name}"


def test_a_gallery_of_look_alikes_does_not_fit_and_every_answer_says_so(real: tuple[Service, TestClient]) -> None:
    service, client = real
    gallery = filled(client, "badges", [look_alike(number) for number in range(60)])
    found = checked(service, client, gallery)
    assert found["calibration"] == "does_not_fit"
    rate = found["stated_rate"]["here"]["self_checked_false_match_rate"]
    assert rate > 0.5
    assert found["stated_rate"]["here"]["self_checked_at_most"] >= rate
    assert_words(found["stated_rate"])
    image = {"image": look_alike(3)}
    alone = client.post(f"{gallery}/search", files=image).json()
    batch = client.post(f"{gallery}/search-batch", files=image).json()["answers"][0]
    pair = {"query": look_alike(3), "picture": look_alike(4)}
    compared = client.post("/v1/compare", files=pair, data={"gallery": "badges"}).json()
    for answer in (alone, batch, compared):
        assert answer["calibration"] == "does_not_fit"
        assert answer["stated_rate"]["here"]["self_checked_false_match_rate"] == rate
    assert (
        client.post(f"{gallery}/search", files=image, data={"threshold": "0.4"}).json()["calibration"] == "not_checked"
    )


def test_look_alikes_of_one_label_fit(real: tuple[Service, TestClient]) -> None:
    service, client = real
    gallery = filled(client, "labelled", [look_alike(number) for number in range(30)], label="badge")
    assert checked(service, client, gallery)["calibration"] == "fits"


def test_a_gallery_of_different_pictures_fits(real: tuple[Service, TestClient]) -> None:
    service, client = real
    client.post("/v1/galleries", json={"name": "different"})
    gallery = "/v1/galleries/different"
    for name in ("astronaut", "camera", "chelsea", "coffee", "coins", "moon", "motorcycle_left", "rocket"):
        for number, quarter in enumerate(corners(name)):
            client.put(f"{gallery}/items/{name}-{number}", files={"image": quarter}, data={"label": name})
    assert checked(service, client, gallery)["calibration"] == "fits"
    answer = client.post(f"{gallery}/search", files={"image": corners("coffee")[1]}).json()
    assert (answer["decision"], answer["calibration"]) == ("match", "fits")


def corners(name: str) -> list[bytes]:
    """The four corners of a photograph, a third of each side long: different pictures of one thing."""
    found = importlib.util.find_spec("skimage")
    assert found is not None
    assert found.origin is not None
    path = next((Path(found.origin).parent / "data").glob(f"{name}.*"))
    with Image.open(path) as photograph:
        whole = photograph.convert("RGB")
    width, height = (side // 3 for side in whole.size)
    places = [(x, y) for x in (0, whole.width - width) for y in (0, whole.height - height)]
    return [as_png(whole.crop((x, y, x + width, y + height))) for x, y in places]


def test_of_a_handful_of_images_nothing_is_concluded(client: TestClient, service: Service) -> None:
    gallery = filled(client, "few", [picture(1), picture(2)])
    client.get(gallery)
    service.check_galleries()
    found = client.get(gallery).json()
    assert found["calibration"] == "not_checked"


def test_a_gallery_that_is_deleted_is_forgotten_by_the_checks(client: TestClient, service: Service) -> None:
    gallery = filled(client, "gone", [picture(number) for number in range(25)])
    assert checked(service, client, gallery)["calibration"] == "fits"
    client.delete(gallery)
    service.check_galleries()
    assert_problem(client.get(gallery), 404)
    filled(client, "gone", [picture(1)])
    again = client.get(gallery).json()
    assert again["calibration"] == "not_checked"
    assert operating_points("x").default_rule == again["rule"]

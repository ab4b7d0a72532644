"""Searches while items are imported, uploaded, replaced and deleted: each answer is one that could be given then."""

import io
import math
import random
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from roadmatch.blobs import FolderBlobs
from roadmatch.gallery import galleries
from roadmatch.gallery.items import GalleryStore
from roadmatch.store.database import open_database
from tests.bundles import picture
from tests.job_oracle import check
from tests.service import running

SEED = 20_261_129
SEARCHERS, WRITERS = 8, 2
IMPORTED, KEPT = 30, 60
"""Items of an import, and items that a writer lets live before it deletes more."""
COMPARED = 20
"""One search in so many has its numbers compared."""
GALLERY = "/v1/galleries/g"
ITSELF = 0.999999


@cache
def photo(number: int) -> bytes:
    return picture(number, side=32)


@dataclass
class Write:
    """What an item became (None: it was deleted), somewhere between when it was asked for and when that was answered;
    by the one clock of this process."""

    photo: int | None
    sent: float
    answered: float = math.inf


@dataclass
class Ledger:
    """The writes of every item, each item's one after the other. Photos are never used twice."""

    writes: dict[str, list[Write]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    fresh: Iterator[int] = field(default_factory=count)

    def begin(self, item: str, shown: int | None) -> Write:
        write = Write(shown, time.monotonic())
        if shown is not None:
            self.owners[shown] = item
        self.writes.setdefault(item, []).append(write)
        return write

    def possible(self, item: str, began: float, ended: float) -> set[int | None]:
        """What a search between these moments may have seen of an item."""
        seen: set[int | None] = {None}
        for write in list(self.writes.get(item, ())):
            if write.answered < began:
                seen = {write.photo}
            elif write.sent < ended:
                seen.add(write.photo)
        return seen

    def living(self) -> dict[str, int]:
        """Items as they are when all writes were answered."""
        last = {item: writes[-1].photo for item, writes in self.writes.items()}
        return {item: shown for item, shown in last.items() if shown is not None}


class Clients:
    """HTTP to the service's processes, each request to one of them by chance."""

    def __init__(self, urls: Sequence[str], rng: random.Random) -> None:
        self._clients = [httpx.Client(base_url=url, timeout=30) for url in urls]
        self._rng = rng

    def ask(self, method: str, address: str, **content: Any) -> Any:
        answer = self._rng.choice(self._clients).request(method, address, **content)
        assert answer.is_success, f"{method} {address}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()


Work = Callable[[Clients, random.Random], None]


@dataclass(eq=False)
class Scene:
    """A gallery that is written to and searched at the same time; `violations` is what was wrong."""

    urls: Sequence[str]
    searches: int
    ledger: Ledger = field(default_factory=Ledger)
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    violations: list[str] = field(default_factory=list)
    compared: int = 0
    jobs: int = 0

    def play(self) -> None:
        """Until all searches are made. Raises what a thread raised."""
        with ThreadPoolExecutor(SEARCHERS + WRITERS + 1) as threads:
            others = [threads.submit(self._with_clients, self._write, n) for n in range(WRITERS)]
            others.append(threads.submit(self._with_clients, self._import, WRITERS))
            searching = [threads.submit(self._with_clients, self._search, 100 + n) for n in range(SEARCHERS)]
            try:
                for one in searching:
                    one.result()
            finally:
                self.over.set()
            for one in others:
                one.result()

    def _with_clients(self, work: Work, number: int) -> None:
        rng = random.Random(SEED + number)
        with Clients(self.urls, rng) as clients:
            work(clients, rng)

    def _write(self, clients: Clients, rng: random.Random) -> None:
        """Upload, replace and delete items of its own."""
        mine: list[str] = []
        while not self.over.is_set():
            chance = rng.random()
            if mine and chance < (0.3 if len(mine) < KEPT else 0.6):
                item = mine.pop(rng.randrange(len(mine)))
                write = self.ledger.begin(item, None)
                clients.ask("DELETE", f"{GALLERY}/items/{item}")
            else:
                shown = next(self.ledger.fresh)
                item = rng.choice(mine) if mine and chance < 0.7 else f"put-{shown}"
                write = self.ledger.begin(item, shown)
                clients.ask("PUT", f"{GALLERY}/items/{item}", files={"image": photo(shown)})
                mine = [*mine, item] if item not in mine else mine
            write.answered = time.monotonic()
            time.sleep(0.01)

    def _import(self, clients: Clients, rng: random.Random) -> None:
        """Jobs: items come by an archive, some are replaced by the next one, most go by a list."""
        mine: list[str] = []
        while not self.over.is_set():
            photos = [next(self.ledger.fresh) for _ in range(IMPORTED)]
            shown = {f"job-{number}": number for number in photos[5:]} | dict(
                zip(rng.sample(mine, min(5, len(mine))), photos, strict=False)
            )
            headers = {"Content-Type": "application/zip"}
            self._job(clients, shown, "POST", f"{GALLERY}/imports", content=archive(shown), headers=headers)
            mine = list(dict.fromkeys([*mine, *shown]))
            if len(mine) > KEPT:
                gone = rng.sample(mine, len(mine) - KEPT // 2)
                mine = [item for item in mine if item not in gone]
                self._job(clients, dict.fromkeys(gone), "DELETE", f"{GALLERY}/items", json={"ids": gone})

    def _job(self, clients: Clients, items: dict[str, Any], method: str, address: str, **content: Any) -> None:
        writes = [self.ledger.begin(item, shown) for item, shown in items.items()]
        job = clients.ask(method, address, **content)
        while job["state"] in ("queued", "running"):
            time.sleep(0.02)
            job = clients.ask("GET", f"/v1/jobs/{job['id']}")
        assert (job["state"], job["done"]) == ("succeeded", len(items)), job
        answered = time.monotonic()
        for write in writes:
            write.answered = answered
        self.jobs += 1
        self.begun.set()

    def _search(self, clients: Clients, rng: random.Random) -> None:
        assert self.begun.wait(60), "the first job does not end"  # a worker starts first
        seq = 0
        for number in range(self.searches // SEARCHERS):
            query = self._query(rng)
            began = time.monotonic()
            answer = clients.ask("POST", f"{GALLERY}/search", files={"image": photo(query)})
            ended = time.monotonic()
            self._judge(query, answer, began, ended)
            if answer["seq"] < seq:
                self.violations.append(f"seq {answer['seq']} after {seq}")
            seq = answer["seq"]
            if number % COMPARED == 0:
                self._compare(clients, query, answer, began, ended)

    def _query(self, rng: random.Random) -> int:
        """A photo of an item as it is, or as it was once, or of none."""
        items = list(self.ledger.writes)
        if not items or rng.random() < 0.1:
            return 10**6 + rng.randrange(50)
        writes = list(self.ledger.writes[rng.choice(items[-150:])])
        shown = [one.photo for one in writes if one.photo is not None]
        return shown[-1] if rng.random() < 0.8 else rng.choice(shown)

    def _judge(self, query: int, answer: Any, began: float, ended: float) -> None:
        """The answer's items, each once, in order, and each as it could be seen then."""
        hits = answer["matches"] + answer["near_misses"]
        wrong = self.violations.append
        if len({hit["item"] for hit in hits}) < len(hits):
            wrong(f"an item twice: {hits}")
        if [hit["score"] for hit in hits] != sorted((hit["score"] for hit in hits), reverse=True):
            wrong(f"not in the order of scores: {hits}")
        if any(hit["margin"] < 0 for hit in answer["matches"]) or any(m["margin"] >= 0 for m in answer["near_misses"]):
            wrong(f"a decision that its margin does not explain: {answer}")
        for hit in hits:
            seen = self.ledger.possible(hit["item"], began, ended)
            if seen == {None}:
                wrong(f"{hit['item']} was deleted, or never there")
            if hit["similarity"] >= ITSELF and query not in seen:
                wrong(f"{hit['item']} as it was before its replacement was answered")
        owner = self.ledger.owners.get(query)
        if owner and self.ledger.possible(owner, began, ended) == {query}:
            best: Any = hits[0] if hits else {"item": None, "similarity": 0.0}
            if best["item"] != owner or best["similarity"] < ITSELF or answer["decision"] != "match":
                wrong(f"{owner} is not found by its own picture")

    def _compare(self, clients: Clients, query: int, answer: Any, began: float, ended: float) -> None:
        """The numbers of the best items, where it is certain which picture they had."""
        for hit in (answer["matches"] + answer["near_misses"])[:3]:
            seen = self.ledger.possible(hit["item"], began, ended)
            shown = next(iter(seen))
            if len(seen) > 1 or shown is None:
                continue
            files = {"query": photo(query), "picture": photo(shown)}
            pair = clients.ask("POST", "/v1/compare", files=files, data={"gallery": "g"})
            self.compared += 1
            if (pair["similarity"], pair["score"]) != (hit["similarity"], hit["score"]):
                self.violations.append(f"{hit} where compare says {pair['similarity']}, {pair['score']}")


def archive(shown: dict[str, int]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        for item, number in shown.items():
            zipped.writestr(item, photo(number))
    return held.getvalue()


def assert_consistent(folder: Path, bundle: Path, database: str, searches: int, processes: int) -> None:
    """So many searches of so many processes of the service, and at last what must be there is there."""
    data = folder / "data"
    with ExitStack() as stack:
        settings = {"database": database, "cpus": 1, "nice": 0}
        served = [stack.enter_context(running(data, bundle, **settings, workers=1)) for _ in range(processes)]
        httpx.post(f"{served[0].url}/v1/galleries", json={"name": "g"}).raise_for_status()
        scene = Scene([one.url for one in served], searches)
        started = time.monotonic()
        scene.play()
        took_s = time.monotonic() - started
        writes = sum(map(len, scene.ledger.writes.values()))
        print(f"{searches} searches, {writes} writes, {scene.jobs} jobs, {scene.compared} compared, {took_s:.1f} s")
        assert scene.violations == []
        assert scene.jobs
        assert scene.compared
        living = {item: sha256(photo(shown)).hexdigest() for item, shown in scene.ledger.living().items()}
        with closing(open_database(database)) as opened:
            check(GalleryStore(opened, FolderBlobs(data / "pictures")), galleries.get(opened, "g"), living)


@pytest.mark.faults
def test_searches_among_writes_are_consistent(tmp_path: Path, bundle: Path, sqlite_url: str) -> None:
    assert_consistent(tmp_path, bundle, sqlite_url, searches=480, processes=1)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_twenty_thousand_searches_among_writes_are_consistent(tmp_path: Path, bundle: Path, sqlite_url: str) -> None:
    assert_consistent(tmp_path, bundle, sqlite_url, searches=20_000, processes=1)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_twenty_thousand_searches_of_two_processes_among_writes_are_consistent(
    tmp_path: Path, bundle: Path, postgres_url: str
) -> None:
    assert_consistent(tmp_path, bundle, postgres_url, searches=20_000, processes=2)

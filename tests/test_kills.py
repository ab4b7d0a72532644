"""kill -9 in a stream of writes: what was acknowledged is there, what was not is there once or not at all."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from roadmatch.blobs import FolderBlobs
from roadmatch.gallery.items import GalleryStore
from roadmatch.gallery.sweep import sweep
from roadmatch.store.database import open_database
from roadmatch.store.tables import images
from tests.bundles import picture
from tests.service import Served, start

MOMENTS = ("blob_written", "before_commit", "after_commit")
CLIENTS = 3
GALLERY = "/v1/galleries/g"
RECHECKED = 40
SEED = 20_261_129


@cache
def photo(number: int) -> bytes:
    return picture(number, side=32)


@dataclass(frozen=True)
class Write:
    """A request of a client. label: tells items apart, also those whose id is the service's; photo: None deletes."""

    label: str
    kind: str
    photo: int | None

    def send(self, client: httpx.Client, item: str) -> httpx.Response:
        address = f"{GALLERY}/items/{item}"
        if self.photo is None:
            return client.delete(address)
        body: dict[str, Any] = {"files": {"image": photo(self.photo)}, "data": {"label": self.label}}
        if self.kind == "post":
            return client.post(f"{GALLERY}/items", headers={"Idempotency-Key": self.label}, **body)
        return client.put(address, **body)


class Ledger:
    """What one client sent and what was acknowledged, on disk before it goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a")

    def sent(self, write: Write) -> None:
        self._append({"sent": [write.label, write.kind, write.photo]})

    def acknowledged(self, item: str) -> None:
        self._append({"acknowledged": item})

    def close(self) -> None:
        self._file.close()

    def read(self) -> "Account":
        """What the file says."""
        account = Account()
        for line in self._path.read_text().splitlines():
            entry = json.loads(line)
            if "sent" in entry:
                account.pending = Write(*entry["sent"])
                account.labels.add(account.pending.label)
            elif account.pending is not None:
                account.settle(entry["acknowledged"])
        return account

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@dataclass
class Account:
    """What must be there: by label, the photo of each item (None: deleted) and its id; and the write that is open."""

    photos: dict[str, int | None] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    pending: Write | None = None
    labels: set[str] = field(default_factory=set)

    def settle(self, item: str) -> None:
        assert self.pending is not None
        self.photos[self.pending.label] = self.pending.photo
        self.ids[self.pending.label] = item
        self.pending = None

    def living(self) -> list[str]:
        return [label for label, shown in self.photos.items() if shown is not None]


class Client(threading.Thread):
    """Sends one write after the other until the service dies or it is told to stop."""

    def __init__(self, name: str, url: str, ledger: Ledger, rng: random.Random, counter: Iterator[int]) -> None:
        super().__init__(name=name)
        self._url, self._ledger, self._rng, self._counter = url, ledger, rng, counter
        self.in_flight = threading.Event()
        self.done = 0
        self.failure: str | None = None
        self._halt = threading.Event()

    def halt(self) -> None:
        self._halt.set()

    def run(self) -> None:
        account = self._ledger.read()
        with httpx.Client(base_url=self._url, timeout=20) as client:
            while not self._halt.is_set():
                write = self._next(account)
                self._ledger.sent(write)
                account.pending = write
                self.in_flight.set()
                try:
                    answer = write.send(client, account.ids.get(write.label, write.label))
                except httpx.TransportError:
                    return
                finally:
                    self.in_flight.clear()
                if not answer.is_success:
                    self.failure = f"{write}: {answer.status_code} {answer.text}"
                    return
                item = account.ids.get(write.label, write.label) if write.photo is None else answer.json()["item"]["id"]
                self._ledger.acknowledged(item)
                account.settle(item)
                self.done += 1

    def _next(self, account: Account) -> Write:
        number = next(self._counter)
        living = account.living()
        chance = self._rng.random()
        if living and chance < 0.15:
            return Write(self._rng.choice(living), "put", number)
        if living and chance < 0.3:
            return Write(self._rng.choice(living), "delete", None)
        label = f"{self.name}-{number}"
        return Write(label, "post" if chance > 0.65 else "put", number)


def listed(client: httpx.Client) -> list[Any]:
    items: list[Any] = []
    cursor: dict[str, str] = {}
    while True:
        page = client.get(f"{GALLERY}/items", params={"limit": "1000", **cursor}).raise_for_status().json()
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        cursor = {"cursor": page["next_cursor"]}


def check_listing(items: Sequence[Any], accounts: Sequence[Account]) -> dict[str, Any]:
    """Every acknowledged write shows, an open one wholly or not at all, and nothing else -> items by label."""
    by_label = {item["label"]: item for item in items}
    assert len(by_label) == len(items), "an item is there twice"
    assert len({item["id"] for item in items}) == len(items)
    assert by_label.keys() <= set().union(*(account.labels for account in accounts)), "an item that nobody sent"
    for account in accounts:
        for label in account.labels:
            allowed = {account.photos.get(label)}
            if account.pending is not None and account.pending.label == label:
                allowed.add(account.pending.photo)
            item = by_label.get(label)
            shown = None if item is None else [image["sha256"] for image in item["images"]]
            wanted = [None if number is None else [sha256(photo(number)).hexdigest()] for number in allowed]
            assert shown in wanted, f"{label} shows {shown}, expected one of {allowed}"
            if item is not None and label in account.ids and label in account.living():
                assert item["id"] == account.ids[label]
    return by_label


def check_found(client: httpx.Client, by_label: dict[str, Any], photos: dict[str, int], labels: Sequence[str]) -> None:
    """Each of these items is its own picture's best match, and no answer holds an item twice or one that is gone."""
    known = {item["id"] for item in by_label.values()}
    for begin in range(0, len(labels), 64):
        some = labels[begin : begin + 64]
        files = [("image", photo(photos[label])) for label in some]
        answers = client.post(f"{GALLERY}/search-batch", files=files).raise_for_status().json()["answers"]
        for label, answer in zip(some, answers, strict=True):
            hits = answer["matches"] + answer["near_misses"]
            ids = [hit["item"] for hit in hits]
            assert ids[0] == by_label[label]["id"], f"{label} is not its own best match"
            assert hits[0]["similarity"] >= 0.999999
            assert answer["decision"] == "match"
            assert len(set(ids)) == len(ids)
            assert set(ids) <= known
            assert answer["gallery_size"] == len(by_label)


def retry(client: httpx.Client, ledger: Ledger, account: Account) -> None:
    """The client sends what was not acknowledged once more, and now it is."""
    write = account.pending
    assert write is not None
    answer = write.send(client, account.ids.get(write.label, write.label))
    assert answer.status_code in ((204, 404) if write.photo is None else (200, 201)), answer.text
    item = account.ids.get(write.label, write.label) if write.photo is None else answer.json()["item"]["id"]
    ledger.acknowledged(item)
    account.settle(item)


def check_after_restart(
    served: Served, ledgers: Sequence[Ledger], fresh: set[str], rng: random.Random, *, everything: bool = False
) -> None:
    accounts = [ledger.read() for ledger in ledgers]
    with httpx.Client(base_url=served.url, timeout=20) as client:
        check_listing(listed(client), accounts)
        for ledger, account in zip(ledgers, accounts, strict=True):
            if account.pending is not None:
                retry(client, ledger, account)
        by_label = check_listing(listed(client), accounts)
        photos = {label: shown for account in accounts for label, shown in account.photos.items() if shown is not None}
        assert by_label.keys() == photos.keys()
        older = sorted(photos.keys() - fresh)
        again = older if everything else rng.sample(older, min(RECHECKED, len(older)))
        check_found(client, by_label, photos, [*sorted(photos.keys() & fresh), *again])
        shown = client.get(GALLERY).json()
        assert (shown["items"], shown["images"]) == (len(photos), len(photos))


def run_until_killed(served: Served, clients: Sequence[Client], rng: random.Random, moment: str | None) -> None:
    """Let the clients write until the service kills itself at a moment, or is killed while a request is in flight."""
    for client in clients:
        client.start()
    if moment is None:
        while sum(client.done for client in clients) < CLIENTS:
            assert served.process.poll() is None
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.4))
        while not any(client.in_flight.is_set() for client in clients):
            time.sleep(0.0005)
    else:
        served.process.wait(30)
    served.kill()
    for client in clients:
        client.halt()
        client.join(20)
        assert client.failure is None, client.failure


def kill_rounds(bundle: Path, tmp_path: Path, rounds: int, seed: int, database: str = "") -> None:
    """So many kills on one data folder, 9 of 20 at a named moment, 11 at any; then the sweep."""
    rng = random.Random(seed)
    data = tmp_path / "data"
    named = [MOMENTS[number % 3] for number in range(rounds * 9 // 20)]
    plan: list[str | None] = [*named, *[None] * (rounds - len(named))]
    rng.shuffle(plan)
    counter = iter(range(1, 1_000_000))
    ledgers = [Ledger(tmp_path / f"client-{number}.jsonl") for number in range(CLIENTS)]
    served: Served | None = None
    fresh: set[str] = set()
    try:
        for number, moment in enumerate(plan):
            # late enough for the retries of the round before
            failpoint = "" if moment is None else f"{moment}@{rng.randint(CLIENTS + 2, 20)}"
            before = set().union(*(ledger.read().labels for ledger in ledgers))
            served = start(data, bundle, failpoint=failpoint, database=database)
            if number == 0:
                httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).raise_for_status()
            else:
                check_after_restart(served, ledgers, fresh, rng)
            clients = [
                Client(f"c{k}", served.url, ledgers[k], random.Random(rng.random()), counter) for k in range(CLIENTS)
            ]
            run_until_killed(served, clients, rng, moment)
            accounts = [ledger.read() for ledger in ledgers]
            fresh = set().union(*(account.labels for account in accounts)) - before
            assert any(account.pending is not None for account in accounts), "the kill met no request in flight"
        served = start(data, bundle, database=database)
        check_after_restart(served, ledgers, fresh, rng, everything=True)
        assert served.stop() == 0
        check_pictures(data, database, at_least_swept=len(named) // 3)
    except BaseException as error:
        error.add_note(f"seed {seed}, {rounds} rounds, ledgers and data in {tmp_path}")
        raise
    finally:
        if served is not None:
            served.kill()
        for ledger in ledgers:
            ledger.close()


def check_pictures(data: Path, database: str, at_least_swept: int) -> None:
    """After a sweep the files on disk are those that the database names, with the bytes that were sent."""
    blobs = FolderBlobs(data / "pictures")
    opened = open_database(database or f"sqlite:///{data / 'roadmatch.db'}")
    with opened.read() as connection:
        named = {row.blob: row.sha256 for row in connection.execute(images.select())}
    assert set(blobs.keys_older_than(-1)) >= named.keys(), "a picture is missing"
    assert sweep(GalleryStore(opened, blobs), grace_s=0) >= at_least_swept  # a kill at blob_written leaves one
    opened.close()
    files = {path.name: path for path in (data / "pictures").rglob("*") if path.is_file()}
    assert files.keys() == named.keys()
    for key, expected in named.items():
        assert sha256(files[key].read_bytes()).hexdigest() == expected


def test_a_repeated_request_makes_one_item_whatever_the_moment_of_the_kill(bundle: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    left: str | None = None  # the key of the request that was killed
    for failpoint in (f"{MOMENTS[0]}@1", f"{MOMENTS[1]}@2", f"{MOMENTS[2]}@2", ""):
        served = start(data, bundle, failpoint=failpoint)
        try:
            with httpx.Client(base_url=served.url, timeout=20) as client:
                client.post("/v1/galleries", json={"name": "g"})
                before = [item["label"] for item in listed(client)]
                assert (left in before) == (failpoint == "")  # only the last kill came after a commit
                if left is not None:
                    answer = Write(left, "post", 1).send(client, "")
                    assert answer.status_code == (200 if failpoint == "" else 201)
                    assert [item["label"] for item in listed(client)].count(left) == 1
                if failpoint:
                    left = failpoint
                    with pytest.raises(httpx.TransportError):
                        Write(left, "post", 1).send(client, "")
                    served.process.wait(10)
        finally:
            served.kill()
    check_pictures(data, "", at_least_swept=2)


@pytest.mark.timeout(300)
def test_twenty_kills_in_a_stream_of_writes_lose_and_double_nothing(bundle: Path, tmp_path: Path) -> None:
    kill_rounds(bundle, tmp_path, 20, SEED)


@pytest.mark.faults
@pytest.mark.timeout(1_800)
def test_a_hundred_kills_lose_and_double_nothing(bundle: Path, tmp_path: Path) -> None:
    kill_rounds(bundle, tmp_path, 100, random.SystemRandom().randrange(10**9))


@pytest.mark.faults
@pytest.mark.timeout(1_800)
def test_kills_on_postgresql_lose_and_double_nothing(bundle: Path, tmp_path: Path, postgres_url: str) -> None:
    kill_rounds(bundle, tmp_path, 40, random.SystemRandom().randrange(10**9), postgres_url)

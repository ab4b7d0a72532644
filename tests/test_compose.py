"""The compose form, by its files: what docker-compose.yml, the Dockerfile, nginx and the dashboards may say."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.metrics import Metrics
from app.settings import Settings as AppSettings
from roadmatch.jobs.queue import Load, State
from tests.stack import COMPOSE, ROOT, compose, seconds
from worker.settings import Settings as WorkerSettings

DOCKER = ROOT / "docker"
PROGRAMS = Path(sys.executable).parent
VARIABLES = {"POSTGRES_PASSWORD": "p" * 24, "REDIS_PASSWORD": "r" * 24}
FILE = compose(VARIABLES)
SERVICES: dict[str, Any] = FILE["services"]
OURS = ("app", "worker", "worker-gpu")
STORES = ("postgres", "redis")
EXTRAS = ("postgres", "celery", "s3")
each_service = pytest.mark.parametrize("name", SERVICES)


def test_the_compose_file_is_what_the_specification_allows() -> None:
    schema: list[str | Path] = [PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    done = subprocess.run(schema, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    done = subprocess.run([PROGRAMS / "hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@each_service
def test_a_service_can_write_to_named_volumes_and_memory_only(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    for volume in service.get("volumes", []):
        source, _, mode = volume.split(":")[0], volume.split(":")[1], volume.split(":")[2:]
        assert source in FILE["volumes"] or mode == ["ro"], volume
        assert not source.startswith(".") or (ROOT / source).exists(), volume
    assert all("size=" in mount for mount in service.get("tmpfs", []))


@each_service
def test_a_service_is_no_root_and_can_become_nothing_else(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


@each_service
def test_a_service_has_bounds_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert service["restart"] == "unless-stopped"


@each_service
def test_an_image_has_a_whole_version(name: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+(-[a-z]+)?$|:\d+\.\d+-[a-z]+$", SERVICES[name]["image"])


@each_service
def test_a_service_is_asked_for_its_health_and_waited_for_by_it(name: str) -> None:
    service = SERVICES[name]
    check = service["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert seconds(check["timeout"]) <= seconds(check["interval"])
    assert {needed["condition"] for needed in service.get("depends_on", {}).values()} <= {"service_healthy"}


def test_only_nginx_is_published_and_grafana_where_it_is_asked_for_both_on_this_machine_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"nginx": ["127.0.0.1:8080:8080"], "grafana": ["127.0.0.1:3000:3000"]}
    assert SERVICES["grafana"]["profiles"] == ["monitoring"]
    assert all("network_mode" not in service for service in SERVICES.values())


def test_the_stores_and_the_workers_are_on_a_network_that_leads_nowhere() -> None:
    assert FILE["networks"]["back"] == {"internal": True}
    for name in (*STORES, "worker", "worker-gpu"):
        assert SERVICES[name]["networks"] == ["back"]
    assert not set(SERVICES["nginx"]["networks"]) & set(SERVICES["redis"]["networks"])


@pytest.mark.parametrize("name", VARIABLES)
def test_a_password_that_is_empty_stops_the_start(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: set it in .env"):
        compose({**VARIABLES, name: ""})


@pytest.mark.parametrize("name", OURS)
def test_every_setting_is_one_that_its_program_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("ROADMATCH_")]:
        monkeypatch.delenv(variable)
    for variable, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(variable, value)
    settings = AppSettings.read() if name == "app" else WorkerSettings.read()
    assert settings.database_url == f"postgresql://roadmatch:{'p' * 24}@postgres:5432/roadmatch"
    assert settings.broker == f"redis://:{'r' * 24}@redis:6379/0"
    assert [f"{settings.data}:{settings.data}"] == [f"{settings.data}:{SERVICES[name]['volumes'][0].split(':')[1]}"]
    for variable in SERVICES[name]["environment"]:  # and none that it passes over
        assert variable.removeprefix("ROADMATCH_").lower() in type(settings).model_fields


def test_the_grace_periods_are_longer_than_what_the_programs_take() -> None:
    assert seconds(SERVICES["app"]["stop_grace_period"]) >= AppSettings.model_fields["shutdown_s"].default + 5
    assert seconds(SERVICES["worker"]["stop_grace_period"]) >= 20 + 20 + 5  # Celery's, and the worker's own after it


def test_redis_keeps_messages_and_drops_none() -> None:
    command = SERVICES["redis"]["command"][-1]
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert VARIABLES["REDIS_PASSWORD"] not in command


def test_the_example_names_every_variable_of_the_compose_file_with_its_default() -> None:
    example = dict(re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    text = COMPOSE.read_text()
    assert example.keys() == set(re.findall(r"\$\{([A-Z_]+)", text))
    defaults = set(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text))
    assert {(name, value) for name, value in example.items() if name not in VARIABLES} == defaults
    assert all(example[name] == "" for name in VARIABLES)


def test_every_variable_of_the_nginx_template_is_given() -> None:
    template = (DOCKER / "nginx" / "nginx.conf.template").read_text()
    assert set(re.findall(r"\$\{(NGINX_[A-Z_]+)\}", template)) <= SERVICES["nginx"]["environment"].keys()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_lock_is_what_the_project_asks_for(kind: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in (kind, *EXTRAS) for line in extras[extra])]
    lock = (DOCKER / f"requirements-{kind}.txt").read_text()
    locked = {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE)
    }
    for requirement in map(Requirement, [*wanted, *(DOCKER / "build.in").read_text().split("#")[0].split()]):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement
    assert all("--hash=sha256:" in block for block in re.findall(r"^\w.*?(?=^\w|\Z)", lock, re.MULTILINE | re.DOTALL))
    assert "://" not in re.sub(r"^ *#.*$", "", lock, flags=re.MULTILINE)


def test_the_image_is_made_of_files_that_the_build_is_given() -> None:
    copied = re.findall(r"^COPY (?!--)(\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(copied) - {"."} <= set(allowed)
    assert all((ROOT / name).exists() for name in allowed)
    assert {"app", "roadmatch", "worker"} <= set(allowed)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names of the service's samples, as its /metrics has them, and of Prometheus's own."""
    text = Metrics().text(Load(dict.fromkeys(State, 0), done=0, unchanged=0, failed=0, waiting_since=None)).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    histograms = {f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"}
    return set(kinds) | histograms | set(re.findall(r"^([a-z_]+)(?=[{ ])", text, re.MULTILINE)) | {"up"}


def names(expression: str) -> set[str]:
    """Of the metrics in a PromQL expression."""
    return set(re.findall(r"\b(?:roadmatch_[a-z_]+|up)\b", expression))


def test_every_metric_of_the_dashboard_is_one_of_the_service(known: set[str]) -> None:
    board = json.loads((DOCKER / "grafana" / "dashboards" / "roadmatch.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert all(names(expression) for expression in expressions)
    shown = set().union(*map(names, expressions))
    assert shown <= known
    for needed in ("requests_total", "refused_requests_total", "decisions_total", "jobs", "job_entries_total"):
        assert f"roadmatch_{needed}" in shown
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}


def test_every_metric_of_the_alerts_is_one_of_the_service(known: set[str]) -> None:
    rules = yaml.safe_load((DOCKER / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]
    assert {rule["labels"]["severity"] for rule in rules} == {"page", "ticket"}
    for rule in rules:
        assert names(rule["expr"])
        assert names(rule["expr"]) <= known
        assert rule["annotations"].keys() == {"summary", "mend"}


def test_prometheus_asks_the_service_by_a_name_that_it_goes_by() -> None:
    read = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in read["scrape_configs"]}
    environment = SERVICES["app"]["environment"]
    assert targets["roadmatch"] == [f"app:{environment['ROADMATCH_PORT']}"]
    assert "app" in environment["ROADMATCH_HOSTS"].split(",")
    assert all((DOCKER / "prometheus" / file).exists() for file in read["rule_files"])

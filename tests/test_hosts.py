import pytest

from app.settings import Settings, SettingsError
from roadmatch.jobs.hosts import hosts_of
from worker.settings import Settings as WorkerSettings
from worker.settings import SettingsError as WorkerSettingsError


def test_hosts_are_names_in_any_case_with_commas_between_them() -> None:
    assert hosts_of("") == frozenset()
    assert hosts_of(" Pictures.example.com , cdn.example.org,") == {"pictures.example.com", "cdn.example.org"}


@pytest.mark.parametrize(
    "name", ["169.254.169.254", "localhost", "a b.example.com", "https://example.com", "*.example.com"]
)
def test_a_host_that_is_no_name_is_found_when_a_program_starts(name: str) -> None:
    with pytest.raises(SettingsError, match="ROADMATCH_IMPORT_HOSTS: a host is a name in small letters"):
        Settings.read({}, import_hosts=f"good.example.com,{name}")
    with pytest.raises(WorkerSettingsError, match="ROADMATCH_IMPORT_HOSTS: a host is a name in small letters"):
        WorkerSettings.read({}, import_hosts=name)

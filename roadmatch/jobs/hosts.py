"""Names of the hosts whose pictures may be fetched."""

import re

_HOST = re.compile(r"(?=.{1,253}\Z)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")


def hosts_of(text: str) -> frozenset[str]:
    """Names with commas between them, in any case. Raises ValueError for what is no name of a host."""
    return checked(frozenset(host.strip().lower() for host in text.split(",") if host.strip()))


def checked(hosts: frozenset[str]) -> frozenset[str]:
    """The hosts, if each is a name as pictures.example.com: an address or a bare name is none. Raises ValueError."""
    for host in sorted(hosts):
        if not _HOST.fullmatch(host):
            raise ValueError(f"a host is a name in small letters, as pictures.example.com: {host!r}")
    return hosts

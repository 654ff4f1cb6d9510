"""API keys: held as hashes, compared in constant time, each with a tenant's name."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autellix.errors import ConfigError

_ENTRY = re.compile(r"([A-Za-z0-9._-]{1,64}):([0-9a-fA-F]{64})(?::(\d{1,12}))?\Z")


class Tenant(NamedTuple):
    """Whose key it is."""

    name: str
    digest: bytes
    handicap_ms: int  # added to the attained service of every call of the tenant


ANYBODY = Tenant("anybody", b"", 0)


def parse_keys(entries: Sequence[str], field: str = "api_keys") -> tuple[Tenant, ...]:
    """Return the tenants in entries ``tenant:sha256[:handicap_ms]`` of a setting.

    Raises:
        ConfigError: an entry is malformed; the message does not show it, as it may be a key.
    """
    tenants = []
    for number, entry in enumerate(entries, start=1):
        match = _ENTRY.match(entry.strip())
        if match is None:
            raise ConfigError(f"{field}: entry {number} is not tenant:sha256[:handicap_ms]")
        tenants.append(Tenant(match[1], bytes.fromhex(match[2]), int(match[3] or 0)))
    return tuple(tenants)


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the entries of a file, one a line; empty lines and ``#`` comments are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return tuple(line for line in lines if line)


def presented_key(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request: a bearer token, or Anthropic's ``x-api-key``."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key")


def digest_of(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def find_tenant(key: str | None, tenants: Sequence[Tenant]) -> Tenant | None:
    """Return whose key it is; every tenant is compared, so that time tells nothing."""
    if key is None:
        return None
    digest = digest_of(key)
    found = None
    for tenant in tenants:
        if hmac.compare_digest(digest, tenant.digest):
            found = tenant
    return found


def scope_of(key: str | None, tenant: Tenant) -> str:
    """Return the scope of a request's ids: the tenant, or without tenants the key's hash."""
    if tenant is not ANYBODY:
        return tenant.name
    if key is None:
        return ""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

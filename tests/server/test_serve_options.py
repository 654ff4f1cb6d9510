"""``autellix serve`` with TLS, a file of keys, state and an admin site, before a fake engine."""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import trustme

from autellix.errors import ConfigError
from autellix.server.gateway.backend import state_or_default
from autellix.server.listeners import tls_context
from autellix.server.server_config import keys_of
from tests.gateway.fake_engine import FakeEngine, engine_in_thread
from tests.serve_process import ServeProcess, wait_until


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Who signs the server's certificate."""
    return trustme.CA()


@pytest.fixture(scope="module")
def certificate(authority: trustme.CA, tmp_path_factory) -> tuple[Path, Path]:
    """A certificate chain and its key, as files."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    chain, key = folder / "chain.pem", folder / "key.pem"
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(chain), append=number > 0)
    issued.private_key_pem.write_to_path(str(key))
    return chain, key


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    """A fake engine on a port, in a thread of its own."""
    with engine_in_thread(tmp_path) as (made, _):
        yield made


async def test_tls_keys_admin_and_state_of_a_real_server(
    engine: FakeEngine, certificate, authority: trustme.CA, tmp_path: Path
):
    """One start with all of them; a second one finds the session of the first."""
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\nred:{hashlib.sha256(b'k1').hexdigest()}:250\n")
    state = tmp_path / "state.sqlite"
    arguments = (
        "--engine-url", f"http://127.0.0.1:{engine.address.port}", "--policy", "program",
        "--tls-certificate", str(certificate[0]), "--tls-key", str(certificate[1]),
        "--keys", str(keys), "--state", str(state), "--admin-host", "0.0.0.0",
        "--admin-port", "0",
    )  # fmt: skip
    context = ssl.create_default_context()
    authority.configure_trust(context)
    red = {"authorization": "Bearer k1", "X-Autellix-Session": "run-1"}
    body = {"model": "m", "messages": []}
    for turn in (1, 2):
        server = ServeProcess(tmp_path / f"log{turn}", *arguments)
        try:
            url = f"https://127.0.0.1:{server.port}"
            text = server.log.read_text
            wait_until(lambda: "ready: " in text(), 60)  # noqa: B023
            found = re.search(r"admin site on https://0\.0\.0\.0:(\d+), key in (\S+)", text())
            assert found is not None
            admin_key = Path(found[2]).read_text().strip()
            assert admin_key not in text()
            async with aiohttp.ClientSession() as client:
                chat = f"{url}/v1/chat/completions"
                async with client.post(chat, json=body, headers=red, ssl=context) as answer:
                    assert answer.status == 200
                assert int(engine.seen[-1].headers["x-vllm-priority"]) >= 250
                async with client.post(chat, json=body, ssl=context) as answer:
                    assert answer.status == 401
                one = f"{url}/autellix/v1/sessions/run-1"
                async with client.get(one, headers=red, ssl=context) as answer:
                    assert (await answer.json())["calls"] == turn
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await client.get(one, headers=red)
                with pytest.raises(aiohttp.ClientError):
                    await client.get(one.replace("https", "http"), headers=red)
                status = f"https://127.0.0.1:{found[1]}/autellix/v1/admin/status"
                bearer = {"authorization": f"Bearer {admin_key}"}
                async with client.get(status, headers=bearer, ssl=context) as answer:
                    assert (await answer.json())["keys"][0]["tenant"] == "red"
                async with client.get(status, headers=red, ssl=context) as answer:
                    assert answer.status == 401
            assert server.stop() == 0, text()
            assert "k1" not in text()
        finally:
            server.kill_everything()


def test_wrong_certificates_are_named(certificate, tmp_path: Path):
    """Missing files, halves and pairs that do not fit; nothing at all is no TLS."""
    chain, key = map(str, certificate)
    assert tls_context("", "") is None
    for pair, field in (
        ((chain, ""), "tls_key"), (("", key), "tls_certificate"),
        ((chain, str(tmp_path / "none")), "tls_key"), ((key, key), "tls_certificate"),
        ((chain, chain), "tls_certificate"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{field}: "):
            tls_context(*pair)


def test_a_file_of_keys_must_hold_some(tmp_path: Path):
    """An empty one would let anybody in."""
    path = tmp_path / "keys"
    path.write_text("# nobody yet\n")
    assert keys_of("keys", "") == ()
    for wrong in (str(path), str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"^keys: "):
            keys_of("keys", wrong)


def test_where_state_is_kept_by_default(tmp_path: Path, monkeypatch):
    """A file of this address for this user alone; nothing for a free port or a wrong place."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = Path(state_or_default("", "::1", 8000))
    assert path == tmp_path / "autellix" / "__1-8000.sqlite"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert state_or_default("", "127.0.0.1", 0) == ":memory:"
    assert state_or_default(":memory:", "127.0.0.1", 8000) == ":memory:"
    assert state_or_default("redis://h:1/0", "127.0.0.1", 8000) == "redis://h:1/0"
    with pytest.raises(ConfigError, match=r"^state: "):
        state_or_default("postgres://h", "127.0.0.1", 8000)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert state_or_default("", "127.0.0.1", 8000) == ":memory:"

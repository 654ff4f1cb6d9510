"""Who may look: the admin key in a header, or a cookie that is given for it.

The cookie is no key. It names the admin and the hour it ends, sealed with a secret of this server,
and opens the dashboard's pages and nothing else of the admin site. Where the gateway keeps a
journal, the secret lies beside it, so that a restart of the server asks nobody for the key again;
else it is new at each start. An admin key that is taken back takes its cookies with it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections import deque
from pathlib import Path
from typing import Final

from aiohttp import web

from ...clock import Clock
from ..admin import AdminSite
from ..errors import Busy

COOKIE: Final = "autellix_dashboard"
PATH: Final = "/dashboard"
LASTS_S: Final = 12 * 3600
FAILURES_MAX: Final = 10  # wrong keys in `FAILURES_S`, everybody's together
FAILURES_S: Final = 60.0
_SECRET_BYTES: Final = 32


class Login:
    """Gives cookies for keys, and knows them again.

    Args:
        site: Knows the keys.
        clock: For the hour at which a cookie ends.
        secret: Seals the cookies.
    """

    def __init__(self, site: AdminSite, clock: Clock, secret: bytes) -> None:
        self._site = site
        self._clock = clock
        self._secret = secret
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)

    def cookie_for(self, key: str) -> str | None:
        """Return the cookie for an admin key; None: it is none.

        Raises:
            Busy: too many wrong keys came lately.
        """
        now_s = self._clock.now_s()
        while self._failures and now_s - self._failures[0] > FAILURES_S:
            self._failures.popleft()
        if len(self._failures) >= FAILURES_MAX:
            raise Busy(f"key: {FAILURES_MAX} wrong ones in {FAILURES_S:.0f} s; wait a minute")
        admin = self._site.admin_of(key)
        if admin is None:
            self._failures.append(now_s)
            return None
        text = f"{admin.name}|{int(self._clock.unix_s()) + LASTS_S}"
        return f"{text}|{self._seal(text, admin.digest)}"

    def lets_in(self, request: web.Request) -> bool:
        """Return whether a request has a valid cookie, and is for the dashboard."""
        if not request.path.startswith(f"{PATH}/"):
            return False
        name, _, rest = request.cookies.get(COOKIE, "").partition("|")
        ends, _, seal = rest.partition("|")
        admin = self._site.admin_named(name)
        if admin is None or not (ends.isascii() and ends.isdigit() and len(ends) < 16):
            return False
        right = self._seal(f"{name}|{ends}", admin.digest)
        return hmac.compare_digest(right.encode(), seal.encode("utf-8", "replace")) and (
            int(ends) > self._clock.unix_s()
        )

    def _seal(self, text: str, digest: bytes) -> str:
        message = digest + text.encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def secret_for(journal: str) -> bytes:
    """Return the secret that lies beside a journal, made if it is new; without a file a fresh one.

    Args:
        journal: The gateway's setting ``state``.
    """
    if journal in ("", ":memory:") or "://" in journal:
        return secrets.token_bytes(_SECRET_BYTES)
    path = Path(f"{journal}.dashboard")
    fresh = secrets.token_bytes(_SECRET_BYTES)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        known = path.read_bytes()
        return known if len(known) == _SECRET_BYTES else fresh
    except OSError:  # a folder that cannot be written: the journal says so more loudly
        return fresh
    with os.fdopen(handle, "wb") as file:
        file.write(fresh)
    return fresh

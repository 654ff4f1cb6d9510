"""The dashboard in a headless browser, over a scene that the test changes as it likes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from autellix.server.gateway.dashboard.login import COOKIE, PATH

from .scene import KEY
from .shown import Shown

ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "chromium is not installed; `make system` says how"
#: Pictures of every run; and with AUTELLIX_SCREENSHOTS=docs those of the documents.
PICTURES = Path(__file__).parents[3] / "out" / "screenshots"
DOCUMENTS = Path(__file__).parents[3] / "docs" / "screenshots"
DOCUMENTED = {"programs", "program", "program-dark", "engines", "queues", "programs-phone"}
LIMIT_MS = 20_000


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser for as long as the block."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page in the browser, and what it complained of."""

    def __init__(self, browser: Browser, served: Shown | str, **options: Any) -> None:
        self.url = served if isinstance(served, str) else served.url
        self._served = served
        self.complaints: list[str] = []
        self.context = browser.new_context(
            **{
                "viewport": {"width": 1280, "height": 800},
                "color_scheme": "light",
                "reduced_motion": "reduce",
                **options,
            }
        )
        self.context.set_default_timeout(LIMIT_MS)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def sign_in(self) -> Page:
        """Open the dashboard with a cookie as the form gives it, and wait until it is live."""
        served = self._served
        assert not isinstance(served, str), "of a server elsewhere only the form gives a cookie"
        cookie = served.do(lambda: served.dashboard.login.cookie_for(KEY))
        self.context.add_cookies(
            [{"name": COOKIE, "value": cookie, "domain": "127.0.0.1", "path": PATH}]
        )
        self.page.goto(self.url)
        self.wait_live()
        return self.page

    def give_key(self, key: str = KEY) -> None:
        """Type the key into the form, and wait until it is live."""
        self.page.fill("#key", key)
        self.page.press("#key", "Enter")
        self.wait_live()

    def forgive(self, words: str) -> None:
        """Forget complaints that are the browser's own, of a request that has to fail."""
        self.complaints = [text for text in self.complaints if words not in text]

    def wait_live(self) -> None:
        """Wait until the link is live."""
        self.page.wait_for_selector("#link[data-state=live]")

    def go(self, place: str) -> Page:
        """Go to a page of the dashboard."""
        self.page.evaluate("place => { location.hash = place; }", place)
        return self.page

    def rows(self) -> list[list[str]]:
        """Return the texts of the table's rows in sight, in their order."""
        rows: list[list[str]] = self.page.evaluate(
            """() => [...document.querySelectorAll('.grid-canvas > .grid-row:not([hidden])')]
            .sort((a, b) => a.getAttribute('aria-rowindex') - b.getAttribute('aria-rowindex'))
            .map(row => [...row.children].map(cell => cell.textContent))"""
        )
        return rows

    def cell(self, row: int, column: int) -> str:
        """Return the text of a cell in sight; empty while there is no such row."""
        rows = self.rows()
        return rows[row][column] if row < len(rows) else ""

    def picture(self, name: str) -> None:
        """Keep a picture, and if that is asked for those of the documents there, small."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / f"{name}.png"
        self.page.screenshot(path=path)
        if os.environ.get("AUTELLIX_SCREENSHOTS") == "docs" and name in DOCUMENTED:
            DOCUMENTS.mkdir(parents=True, exist_ok=True)
            with Image.open(path) as picture:
                few = picture.convert("RGB").quantize(
                    256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
                )
                few.save(DOCUMENTS / f"{name}.png", optimize=True)

    def close(self, *forgiven: str) -> None:
        """Close the page, and fail if it complained of anything else."""
        if self.context.pages:
            self.context.close()  # what it still had to say comes now
        for words in forgiven:
            self.forgive(words)
        assert not self.complaints, self.complaints

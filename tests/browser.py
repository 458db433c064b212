"""A real browser for tests of pages: Chromium, without a window, through Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["launched", "opened"]

#: What Linux distributions call it.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def launched() -> Iterator[Browser]:
    """The browser; skips the test where there is none."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, *, scripts: bool = True) -> Iterator[Page]:
    """A page from a file. That it asks for anything else, or has an error, fails the test."""
    troubles: list[str] = []
    requests: list[str] = []
    viewport: Any = {"width": 1180, "height": 900}
    with browser.new_context(viewport=viewport, java_script_enabled=scripts) as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        yield page
    assert troubles == []
    assert requests == [path.as_uri()]

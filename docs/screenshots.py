"""Make the pictures of docs/images anew: run the example that leaks, and look at its page.

    python docs/screenshots.py

Needs Chromium and the `test` extra. Run it when the page of `cupy-zc view` changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"


def main() -> None:
    """Record, make the page, and take its picture with the pointer on a block that leaked."""
    with tempfile.TemporaryDirectory() as folder:
        data, page_file = Path(folder) / "leak.json", Path(folder) / "leak.html"
        for command in (
            ["examples/leak.py", str(data)],
            ["-m", "cupy_zc", "view", str(data), "--html", str(page_file)],
        ):
            subprocess.run([sys.executable, *command], cwd=ROOT, timeout=120, check=True)
        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1180, "height": 940})
            page.goto(page_file.as_uri())
            box = page.locator("canvas").bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 3 * 32 + 12)
            page.screenshot(path=IMAGES / "leak.png")
            browser.close()


if __name__ == "__main__":
    main()

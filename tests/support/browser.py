"""A headless Chromium, driven by the WebDriver protocol that chromedriver speaks over HTTP."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from waiting import eventually

WAIT_S = 60.0


class Browser:
    """One window."""

    def __init__(self, driver: httpx.Client, width: int, height: int, dark: bool) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += [f"--window-size={width},{height}"] + (["--force-dark-mode"] if dark else [])
        wanted = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {"args": flags},
        }
        self._driver = driver
        body = {"capabilities": {"alwaysMatch": wanted}}
        self._session = f"/session/{self._ask('POST', '/session', body)['sessionId']}"
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)  # windows are never narrower than 500 px

    def open(self, url: str) -> None:
        """Returns when the page has loaded."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that the body ``script`` of a function returns; its arguments are in ``arguments``."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any) -> Any:
        """Waits until ``script`` returns something true, and returns it."""
        found: list[Any] = []
        eventually(lambda: found.append(self.run(script, *arguments)) or found[-1], WAIT_S)
        return found[-1]

    def press(self, keys: str) -> None:
        """Type ``keys`` into the focused element."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """A command of Chromium's DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def errors(self) -> list[str]:
        """What the console was told since the last call, warnings included."""
        lines = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Close the window."""
        self._ask("DELETE", self._session)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._driver.request(method, path, json=body)
        assert answer.status_code == 200, answer.text[:2000]
        return answer.json()["value"]


Opener = Callable[..., Browser]


@contextmanager
def browsers() -> Iterator[Opener]:
    """Opens windows: ``open(width, height, dark=False)``. Skips the test where there is no Chromium."""
    if shutil.which("chromedriver") is None or shutil.which("chromium") is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    opened: list[Browser] = []
    try:
        assert process.stdout is not None
        port = next(found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as driver:

            def open_window(width: int = 1280, height: int = 900, *, dark: bool = False) -> Browser:
                opened.append(Browser(driver, width, height, dark))
                return opened[-1]

            try:
                yield open_window
            finally:
                for browser in opened:
                    browser.close()
    finally:
        process.terminate()
        process.wait(20)

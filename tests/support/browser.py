"""A headless Chromium, driven by the WebDriver protocol that chromedriver speaks over HTTP."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from waiting import eventually

WAIT_S = 60.0
DRIVER_STARTS_MAX = 8

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """One Chromium with one window at a time."""

    def __init__(self, driver: httpx.Client) -> None:
        options = {"args": [*FLAGS, "--enable-precise-memory-info", "--js-flags=--expose-gc"]}
        wanted = {"browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"}, "goog:chromeOptions": options}
        self._driver = driver
        body = {"capabilities": {"alwaysMatch": wanted}}
        self._session = f"/session/{self._ask('POST', '/session', body)['sessionId']}"

    def renew(self, width: int, height: int, dark: bool) -> None:
        """Close the window and open another, with nothing of the old one: storage of its tab, console, size."""
        fresh = self._ask("POST", f"{self._session}/window/new", {"type": "tab"})["handle"]
        self._ask("DELETE", f"{self._session}/window")
        self._ask("POST", f"{self._session}/window", {"handle": fresh})
        self.errors()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)  # windows are never narrower than 500 px
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": theme})

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
        """End Chromium."""
        self._ask("DELETE", self._session)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._driver.request(method, path, json=body)
        assert answer.status_code == 200, answer.text[:2000]
        return answer.json()["value"]


Opener = Callable[..., Browser]


def _driver() -> tuple[subprocess.Popen[str], int]:
    """A chromedriver and its port. It chooses a port that is free on IPv4, and ends where the same port of IPv6 is in
    use: then another one is started, a few times."""
    command, printed = ["chromedriver", "--port=0"], ""
    for _ in range(DRIVER_STARTS_MAX):
        with tempfile.TemporaryFile("w+") as errors:  # a pipe that is not read would stop Chromium once it is full
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if port := re.search(r"successfully on port (\d+)", line):
                    return process, int(port[1])
            process.wait(20)
            errors.seek(0)
            printed = "".join(lines) + errors.read()
    raise AssertionError(f"chromedriver did not start in {DRIVER_STARTS_MAX} tries; the last one printed:\n{printed}")


@contextmanager
def browsers() -> Iterator[Opener]:
    """Opens windows of one Chromium, each in the place of the one before: ``open(width, height, dark=False)``. Skips
    the test where there is no Chromium."""
    if shutil.which("chromedriver") is None or shutil.which("chromium") is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    process, port = _driver()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as driver:
            browser = Browser(driver)

            def open_window(width: int = 1280, height: int = 900, *, dark: bool = False) -> Browser:
                browser.renew(width, height, dark)
                return browser

            try:
                yield open_window
            finally:
                browser.close()
    finally:
        process.terminate()
        process.wait(20)

"""Headless Chromium, driven over chromedriver's own protocol: it needs the two programs and no package."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """A session with one page."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def command(self, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._client.post(path, json=body or {}).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{answer['error']}: {answer['message']}")
        return answer

    def tool(self, name: str, **params: Any) -> Any:
        """Call a command of Chromium's developer tools."""
        return self.command("/goog/cdp/execute", {"cmd": name, "params": params})

    def open(self, url: str) -> None:
        self.command("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of a script's `return`."""
        return self.command("/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def fill(self, selector: str, value: str) -> None:
        script = """const [name, value] = arguments; const field = document.querySelector(name); field.value = value;
                    field.dispatchEvent(new Event('input', {bubbles: true}));"""
        self.run(script, selector, value)

    def press(self, selector: str, *keys: str) -> None:
        """Press keys on an element that has the focus."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                self.tool("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def wait(self, script: str, *arguments: Any, seconds: float = 30.0) -> Any:
        """The first result of a script that is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"timed out: {script}"
            time.sleep(0.05)
        return found

    def resize(self, width: int, height: int = 1000) -> None:
        self.tool("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Have the system prefer light or dark colours."""
        self.tool("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> bytes:
        """Photograph the whole page."""
        found = self.tool("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        data = base64.b64decode(found["data"])
        path.write_bytes(data)
        return data

    def problems(self) -> list[str]:
        """Errors that the console has shown since the last call."""
        return [one["message"] for one in self.command("/se/log", {"type": "browser"}) if one["level"] == "SEVERE"]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    assert DRIVER is not None and BROWSER is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        url = f"http://127.0.0.1:{line.rstrip().rstrip('.').rpartition(' ')[2]}"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        body = {"capabilities": {"alwaysMatch": wanted}}
        found = httpx.post(f"{url}/session", json=body, timeout=60).json()["value"]
        session = f"{url}/session/{found['sessionId']}"
        try:
            with httpx.Client(base_url=session, timeout=60) as client:
                yield Browser(client)
        finally:
            httpx.delete(session, timeout=60)  # without it the browser would outlive its driver
    finally:
        driver.terminate()
        driver.wait(10)

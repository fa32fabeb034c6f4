"""Drives a real Chromium through a pipe, by the protocol of its developer tools; needs no other package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE = 120.0  # seconds for one answer, on a busy machine


class Chromium:
    """One browser with one page. `requests` are the addresses it asked for, `complaints` its console errors."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._in, self._out = ours_in, ours_out
        self._rest = b""
        self._number = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        options = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe --no-first-run"
        command = [BINARY, *options.split(), f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self._call("Target.getTargets", session=None)["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, dark: bool, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._call("Page.navigate", {"url": path.resolve().as_uri()})
        deadline = time.monotonic() + _PATIENCE
        while self.evaluate("document.readyState") != "complete" and time.monotonic() < deadline:
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        given: dict[str, Any] = {"format": path.suffix[1:], "captureBeyondViewport": whole}
        if path.suffix == ".webp":
            given["quality"] = 80
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            given["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", given)["data"]))

    def pdf(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.printToPDF", {"printBackground": True})["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, params: dict[str, Any] | None = None, session: str | None = "page") -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE)
            assert ready, "Chromium does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(given["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(given["args"])[:500])

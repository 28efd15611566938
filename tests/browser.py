"""Chromium without a window, spoken to over a pipe by its DevTools protocol: no package is needed.

Messages are JSON, each ended by a zero byte; Chromium reads them from its file 3 and writes to its file 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# Run first in the new process: gives its two open files the numbers 3 and 4, and becomes the browser.
AS_3_AND_4 = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])"""


class Browser:
    """One page. `events` holds what the browser reported, such as exceptions and requests."""

    def __init__(self, folder: Path):
        (their_in, self.out), (self.back, their_out) = os.pipe(), os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-sandbox",
                   "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
                   f"--user-data-dir={folder}", "about:blank"]  # fmt: skip
        ends = (their_in, their_out)
        command = [sys.executable, "-c", AS_3_AND_4, *map(str, ends), CHROMIUM, *options]
        self.process = subprocess.Popen(command, pass_fds=ends, stderr=subprocess.DEVNULL)
        os.close(their_in)
        os.close(their_out)
        self.number, self.buffer, self.session, self.events = 0, b"", None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.back)

    def receive(self, timeout: float) -> dict:
        """The next message, of whatever kind."""
        until = time.monotonic() + timeout
        while b"\0" not in self.buffer:
            if not select.select([self.back], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.back, 1 << 20)
            if not part:
                raise ConnectionError("the browser has ended")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def send(self, method: str, timeout: float = 60, **parameters) -> dict:
        """Call a method of the protocol -> its result. RuntimeError where the browser refuses."""
        self.number += 1
        message = dict(id=self.number, method=method, params=parameters)
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data) :]
        while True:
            answer = self.receive(timeout)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str) -> None:
        """Load an address and wait until its scripts have run."""
        self.send("Page.navigate", url="about:blank")  # a new fragment alone would not load a page again
        self.events.clear()
        self.send("Page.navigate", url=address)
        until = time.monotonic() + 60
        while self.evaluate("location.href == 'about:blank' || document.readyState != 'complete'"):
            if time.monotonic() > until:
                raise TimeoutError(f"{address} does not load")
            time.sleep(0.02)

    def evaluate(self, expression: str, timeout: float = 120):
        """The value of a JavaScript expression; promises are waited for. RuntimeError where it throws."""
        result = self.send(
            "Runtime.evaluate", timeout, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def key(self, name: str, text: str = "", **more) -> None:
        """Press and release a key, such as "Tab" or "ArrowLeft"; `text`: what it types."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                **dict(text=text) if text else {},
                **more,
            )

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and which colour scheme the reader prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Exceptions, errors in the console, and every request but for a file or data."""
        found = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(parameters["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(url)
        return found

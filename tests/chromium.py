"""A page in a real Chromium, through the DevTools protocol over a pipe: no port, no driver, no package."""

import base64
import json
import os
import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60  # that an answer may take, on a machine with much to do
TOLD = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}


def path():
    """Return where Chromium is; without one the test is skipped."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    return found or pytest.skip("there is no Chromium on this machine")


class Chromium:
    """A headless Chromium with one tab, that reaches no other machine.

    ``complaints`` are the errors and warnings that pages have written to the console.
    """

    def __init__(self, folder):
        program = path()
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # DevTools speaks on descriptors 3 and 4; a shell puts ours there.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--disable-background-networking"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *options],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._number, self._session, self.events = b"", 0, None, []
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{room}.enable")

    def call(self, method, **params):
        """Return the answer to a DevTools command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda one: one.get("id") == self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _until(self, wanted):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            while b"\0" not in self._read:
                part = os.read(self._in, 1 << 16)
                if not part:
                    raise RuntimeError(f"Chromium has ended with code {self._process.wait()}")
                self._read += part
            line, _, self._read = self._read.partition(b"\0")
            message = json.loads(line)
            if message.get("method") in TOLD:
                self._complain(message["method"], message["params"])
            self.events.append(message)
            if wanted(message):
                return message
        raise TimeoutError(f"Chromium said nothing for {SECONDS} s")

    def _complain(self, method, params):
        if method == "Runtime.consoleAPICalled" and params["type"] not in ("error", "warning", "assert"):
            return
        if method == "Log.entryAdded" and params["entry"]["level"] not in ("error", "warning"):
            return
        self.complaints.append(json.dumps(params))

    def open(self, url):
        """Open a page, and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=str(url))
        if not any(one.get("method") == "Page.loadEventFired" for one in self.events):
            self._until(lambda one: one.get("method") == "Page.loadEventFired")

    @property
    def requests(self):
        """The addresses that the page has asked for since it was opened."""
        sent = [one for one in self.events if one.get("method") == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in sent]

    def run(self, script):
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {json.dumps(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def until(self, script):
        """Wait until an expression in the page is true."""
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{script} was false for {SECONDS} s; {self.complaints}")
            time.sleep(0.02)

    def choose(self, selector, *files):
        """Choose files for an input, as a person does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def size(self, width, height=900, mobile=False):
        """Give the window a size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def media(self, kind="", scheme="light"):
        """Show the page on ``"print"`` or the screen, and say which colours the person likes."""
        self.call(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def press(self, key, code=0):
        """Press a key and let it go."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def move(self, x, y):
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self):
        """Return the whole page as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def close(self):
        """End the browser."""
        if self._process.poll() is None:
            session, self._session = self._session, None
            try:
                self.call("Browser.close")
            except (RuntimeError, OSError):
                self._session = session
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        os.close(self._out)
        os.close(self._in)

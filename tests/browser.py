"""A real Chromium, spoken to by the DevTools protocol over a pipe."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """One tab, its console, its requests and what goes wrong in it."""

    def __init__(self, to, back):
        self._to, self._back, self._rest, self._number, self._session = to, back, b"", 0, None
        self.errors, self.requests = [], []

    def _read(self, ends):
        while b"\0" not in self._rest:
            if not select.select([self._back], [], [], max(0, ends - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            self._rest += (part := os.read(self._back, 1 << 16))
            assert part, "Chromium has ended"
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _hear(self, message):
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(given["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(part.get("value")) for part in given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    def call(self, method, patience=60, **given):
        """Call a method of the protocol; return what it answers."""
        self._number, ends = self._number + 1, time.monotonic() + patience
        message = {"id": self._number, "method": method, "params": given}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            heard = self._read(ends)
            if heard.get("id") == self._number:
                assert "error" not in heard, (method, heard["error"])
                return heard["result"]
            self._hear(heard)

    def begin(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def value(self, expression):
        """Return what JavaScript says of the page, awaited."""
        said = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def until(self, expression, patience=60):
        """Wait until something is true of the page."""
        ends = time.monotonic() + patience
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < ends, f"never: {expression}; errors: {self.errors}"
            time.sleep(0.05)

    def open(self, address):
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def choose(self, selector, *files):
        """Choose files for an input, as a person does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])


@contextlib.contextmanager
def tab(folder):
    """Yield a tab of a Chromium of its own, whose profile lies in a folder."""
    (theirs_in, to), (back, theirs_out) = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
               f"--user-data-dir={folder}"]  # fmt: skip
    # Chromium reads the descriptor 3 and writes to 4, whatever numbers the pipes have here.
    words = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", words, CHROMIUM, *options],
        pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        one = Tab(to, back)
        one.begin()
        yield one
    finally:
        process.terminate()
        process.wait(timeout=20)
        os.close(to)
        os.close(back)

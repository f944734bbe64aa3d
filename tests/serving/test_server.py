"""The server as a process: a real browser looks at its page, signals end it, and bad input is one sentence."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
import torch
import uvicorn
from bombs import bomb
from PIL import Image
from starlette.testclient import TestClient

import peerbayes as pb
from chromium import Chromium
from commands import refused
from peerbayes.api.fitting import fit
from peerbayes.errors import InputError
from peerbayes.serving.app import make_app
from peerbayes.serving.connections import Server
from peerbayes.serving.limits import Limits
from peerbayes.serving.served import Served
from peerbayes.serving.server import serve

PATH = os.pathsep.join([str(Path(__file__).parent), str(Path(pb.__file__).parent.parent)])


class Process:
    """`peerbayes serve` at a port of its own."""

    def __init__(self, run, files=None):
        words = [sys.executable, "-m", "peerbayes", "serve", str(run.folder), "--port", "0", "--device", "cpu"]
        limited = words if files is None else ["bash", "-c", f'ulimit -n {files}; exec "$0" "$@"', *words]
        self.process = subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.told = self.process.stdout.readline()
        found = re.fullmatch(rf"peerbayes: {run.folder.name} is served at (http://127.0.0.1:\d+) .*\n", self.told)
        assert found, self.told + self.process.stderr.read()
        self.address = found[1]

    def end(self, number):
        """End it by a signal; return its exit code, and what it printed on both streams."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.fixture
def started():
    processes = []

    def start(run, **how):
        processes.append(Process(run, **how))
        return processes[-1]

    yield start
    for one in processes:
        one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    one = Chromium(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def browser(chromium):
    chromium.complaints.clear()
    chromium.size(1200)
    return chromium


def same_origin(requests, address):
    assert f"{address}/predict" in requests
    return [url for url in requests if not url.startswith((f"{address}/", f"blob:{address}/", "data:"))] == []


WIDE = "getBoundingClientRect().width"
DROP = """(async () => {
  const given = new DataTransfer();
  const canvas = new OffscreenCanvas(8, 8);
  canvas.getContext("2d").fillRect(0, 0, 8, 8);
  given.items.add(new File([await canvas.convertToBlob()], "dropped.png"));
  document.getElementById("drop").dispatchEvent(new DragEvent("drop", {dataTransfer: given, bubbles: true}));
})()"""


def test_a_person_drops_an_image_and_sees_whether_it_abstains(browser, certified, started, tmp_path):
    images, _ = certified.data().test.batch(torch.arange(200), torch.device("cpu"))
    wanted = certified.predict(images, coverage=0.95, risk=0.01, device="cpu")
    unsure, sure = int(wanted.abstain.int().argmax()), int((~wanted.abstain).int().argmax())
    for name, number in (("unsure", unsure), ("sure", sure)):
        Image.fromarray(images[number, 0].numpy()).save(tmp_path / f"{name}.png")
    server = started(certified)
    browser.open(server.address)
    browser.until("document.title === 'digits'")
    shown = {}
    for count, name in enumerate(("unsure", "sure"), start=1):
        browser.choose("#file", tmp_path / f"{name}.png")
        browser.until(f"document.querySelectorAll('article').length === {count}")
        shown[name] = browser.run("document.querySelector('article').innerText")
    browser.until("document.querySelector('article img').naturalWidth === 8")
    top = float(wanted.probabilities[sure].max())
    assert browser.run(f"document.querySelector('.bar > div').{WIDE} / document.querySelector('.bar').{WIDE}") == (
        pytest.approx(top, abs=0.005)
    )
    dropped_on = browser.run("document.querySelector('#images').innerText").split("\n")
    assert dropped_on == ["Choose images or drop them here", "At most 32 at once, 16 MiB together"]
    browser.run(DROP)
    browser.until("document.querySelectorAll('article').length === 3")
    assert "dropped.png" in browser.run("document.querySelector('article').innerText")
    about = browser.run("document.querySelector('details').textContent")
    assert browser.complaints == []
    assert same_origin(browser.requests, server.address)
    threshold = certified.certificate.risk.thresholds[0]
    for name, number, verdict in (
        ("unsure", unsure, "It abstains: the answer is not sure enough to be given."),
        ("sure", sure, "It answers."),
    ):
        label, probability = wanted.labels[number], float(wanted.probabilities[number].max())
        assert shown[name].startswith(f"{label}\n{name}.png\n")
        assert verdict in shown[name]
        assert f"{label}\n{100 * probability:.1f} %" in shown[name]
        assert f"and from {threshold:.4g} on at most 1 % of answers are wrong" in shown[name]
        assert f"Set: {''.join(wanted._set_names[number])}" in shown[name]
    assert certified.certificate.describe(certified.about["class_names"])[1] in about
    assert server.end(signal.SIGTERM) == (0, "stopped\n", "")


def test_a_person_types_a_text(browser, texts, started):
    server = started(texts)
    wanted = texts.predict(["goal goal cup <b>"], device="cpu")
    browser.open(server.address)
    browser.until("!document.getElementById('texts').hidden")
    assert browser.run("document.getElementById('images').hidden")
    browser.run("document.getElementById('text').value = 'goal goal cup <b>'")
    browser.run("document.querySelector('#texts button').click()")
    browser.until("document.querySelector('article')")
    shown = browser.run("document.querySelector('article').innerText")
    assert browser.complaints == []
    assert same_origin(browser.requests, server.address)
    browser.run("ask('{', {'Content-Type': 'application/json'}, [])")  # at the end: Chromium complains of it, if late
    browser.until("document.querySelector('#state.fault')")
    assert "is not JSON" in browser.run("document.querySelector('#state').innerText")
    assert shown.startswith(f"{wanted.labels[0]}\ngoal goal cup <b>\n")
    assert shown.count("peerbayes calibrate") == 1
    assert "`" not in shown
    assert "It never abstains: no risk is promised of its answers. peerbayes calibrate RUN" in shown
    browser.size(390, 844, mobile=True)
    browser.run("document.getElementById('text').value = 'goal' + 'x'.repeat(9000) + ' cup'.repeat(2000)")
    browser.run("document.querySelector('#texts button').click(); document.querySelector('details').open = true")
    browser.until("document.querySelectorAll('article').length === 2")
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("document.querySelector('article').offsetHeight") < 844
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as idle:
        idle.send(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")  # and nothing more: it does not hold the end up
        assert server.end(signal.SIGINT) == (0, "stopped\n", "")


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def unlistened(monkeypatch):
    """Nothing is listened for; what would be is told."""
    apps = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **_: apps.append(self.config.app))
    return apps


def test_bad_input_is_one_sentence(capsys, certified, tmp_path, unlistened, monkeypatch):
    nowhere = tmp_path / "nothing"
    sentence = refused(capsys, "serve", nowhere, "--port", 0)
    assert sentence == f"{nowhere}: not a run folder (it has no recipe.toml)"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused(capsys, "serve", certified.folder, "--port", port)
    assert sentence == (
        f"port {port} of 127.0.0.1 can't be listened at (Address already in use); take another one by --port, or 0 "
        "for any that is free"
    )
    assert refused(capsys, "serve", certified.folder, "--port", 70000) == "port is 70000, expected 0 to 65535"
    assert refused(capsys, "serve", certified.folder, "--host", "no.such.host.invalid").startswith(
        "host 'no.such.host.invalid': there is no such address ("
    )
    assert refused(capsys, "serve", certified.folder, "--port", 0, "--timeout", 0) == (
        "serve: seconds: input should be greater than 0, got 0.0"
    )
    sentence = refused(capsys, "serve", certified.folder, "--port", 0, "--draws", 7, "--device", "cpu")
    assert sentence.endswith("promises are of 1 draws, not of 7; leave out draws")
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    assert refused(capsys, "serve", certified.folder) == (
        "serve needs python_multipart: pip install 'peerbayes[serve]'"
    )
    assert unlistened == []


def test_others_are_let_in_with_a_warning(certified, unlistened):
    with pytest.warns(pb.PeerbayesWarning, match="anybody who reaches 0.0.0.0 can ask this server"):
        serve(certified.folder, host="0.0.0.0", port=0, device="cpu")
    serve(certified.folder, host="localhost", port=0, device="cpu")
    assert len(unlistened) == 2


@pytest.mark.parametrize(("host", "names"), [("127.0.0.1", ""), ("localhost", ""), ("127.0.0.2", " or 127.0.0.2")])
def test_each_name_of_the_host_is_told_once(certified, unlistened, host, names):
    serve(certified.folder, host=host, port=0, device="cpu")
    answer = TestClient(unlistened[0], "http://elsewhere.example").get("/health")
    assert answer.json() == {"detail": f"this server is asked for as 127.0.0.1 or localhost or ::1{names} alone"}


def test_inputs_that_no_picture_makes_are_refused_at_the_start(tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    images, labels = torch.rand(24, 1, 4, 16), torch.arange(24) % 3
    run = fit({"a": pb.Point(net)}, data=pb.data.from_arrays((images, labels), (images, labels)), recipe="plain",
              run=tmp_path / "run", overrides=["stages.*.epochs=1", "stages.*.warmup=0"], device="cpu")  # fmt: skip
    with pytest.raises(InputError, match=r"takes inputs of shape \(1, 4, 16\); files and pictures are square"):
        Served(run, ["a"], None, torch.device("cpu")).image(Image.new("RGB", (8, 8)))


def test_exports_and_weights_files_are_served(certified, pair, tmp_path):
    done = pb.export(certified, to="hub", out=tmp_path / "mine")
    exported, first = Served.open(done.folder, device="cpu"), Served.open(certified.folder, device="cpu")
    images, _ = certified.data().test.batch(torch.arange(5), torch.device("cpu"))
    assert torch.equal(exported.predict(images).log_probabilities, first.predict(images).log_probabilities)
    assert exported.certificate == certified.certificate
    peer = Served.open(pair.weights_file("b"), device="cpu", draws=2)
    assert (peer.peer, peer.passes) == ("b", 2)
    alone = pb.export(pb.Point(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))), to="hub",
                      out=tmp_path / "alone", shape=(1, 2, 2))  # fmt: skip
    with pytest.raises(InputError, match="was exported from a posterior without a run"):
        Served.open(alone.folder, device="cpu")


# ---- what nobody thought of ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(run, **limits):
    """Serve a run in this process; yield the port."""
    app = make_app(Served.open(run.folder, device="cpu"), Limits(**limits))
    with socket.create_server(("127.0.0.1", 0)) as place:
        server = Server(app, place, Limits(**limits))
        thread = threading.Thread(target=server.answer)
        thread.start()
        try:
            yield place.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def test_bodies_that_never_come_or_never_end_are_given_up(texts):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with listening(texts, seconds=0.5, body=1000) as port:
        for sent, status, sentence in (
            (b"Content-Length: 100\r\n\r\n", b"503", b"there was no answer within 0.5 s; try again later"),
            (b"Content-Length: 2000\r\n\r\n", b"413", b"the body is larger than 1,000 bytes"),
            (b"Transfer-Encoding: chunked\r\n\r\n" + b"200\r\n" + b"x" * 512 + b"\r\n", b"503", b"no answer"),
            (b"Transfer-Encoding: chunked\r\n\r\n" + 9 * (b"200\r\n" + b"x" * 512 + b"\r\n"), b"413", b"is larger"),
            (b"Content-Length: -1\r\n\r\n", b"400", b""),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(head + sent)
                said = b""
                while part := client.recv(1 << 16):  # until the server closes, as it does not read the rest
                    said += part
            assert said.startswith(b"HTTP/1.1 " + status), said
            assert sentence in said
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:  # and it goes on
            client.sendall(head + b'Content-Length: 16\r\n\r\n{"texts": ["a"]}')
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_who_connects_as_soon_as_it_is_told_waits_for_nobody(texts):
    clients = []

    def ready(_, address):
        port = int(address.rpartition(":")[2])
        for _ in range(100):  # nobody is accepted meanwhile
            clients.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        signal.raise_signal(signal.SIGINT)

    serve(texts.folder, port=0, device="cpu", ready=ready)
    assert len(clients) == 100
    for client in clients:
        client.close()


IDLE = b"GET /health HTTP/1.1\r\nHost: lo"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (IDLE, b""),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + IDLE, b"HTTP/1.1 200"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n", b"HTTP/1.1 200"),
        (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         b"Content-Length: 99999\r\n\r\n", b"HTTP/1.1 503"),
    ],
    ids=["nothing", "head", "second-head", "body-that-nobody-reads", "body"],
)  # fmt: skip
def test_connections_that_trickle_are_closed(texts, sent, status):
    with (
        listening(texts, seconds=0.5) as port,
        socket.create_connection(("127.0.0.1", port), timeout=0.1) as client,
    ):
        client.sendall(sent)
        said, ends = b"", time.monotonic() + 30
        with contextlib.suppress(ConnectionError):  # bytes are on their way when it closes
            while time.monotonic() < ends:
                with contextlib.suppress(TimeoutError):
                    part = client.recv(1 << 16)
                    if not part:
                        break
                    said += part
                if sent:
                    client.sendall(b"x")
        assert time.monotonic() < ends
        assert said.startswith(status)
        assert bool(said) == bool(status)


def test_requests_that_are_refused_are_not_logged(certified, started):
    server = started(certified)
    where = server.address.removeprefix("http://").split(":")
    upgrade = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    for sent, status in ((b"no request\r\n\r\n", b"400"), (upgrade, b"200")):
        with socket.create_connection((where[0], int(where[1]))) as client:
            client.sendall(sent)
            assert client.recv(100).split()[1] == status
    assert server.end(signal.SIGTERM) == (0, "stopped\n", "")


def test_more_connections_than_files_leave_room_for_others(certified, started):
    server = started(certified, files=200)
    port = int(server.address.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(400)]
    for client in idle:
        with contextlib.suppress(ConnectionError):
            client.sendall(IDLE)
    for _ in range(3):
        assert httpx2.get(f"{server.address}/health", timeout=30).status_code == 200
    answer = httpx2.post(f"{server.address}/predict", files={"images": ("b.png", bomb(10_000, 9_500))}, timeout=30)
    assert answer.status_code == 413
    assert answer.json() == {"detail": "b.png: has more than 50,000,000 pixels, which is as much as is decoded"}
    for client in idle:
        client.close()
    assert server.end(signal.SIGTERM) == (0, "stopped\n", "")


@pytest.mark.parametrize("name", ["pair", "texts"])
def test_schemathesis_finds_nothing(name, request, tmp_path):
    with listening(request.getfixturevalue(name)) as port:
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json", "--checks",
             "all", "--max-examples", "10", "--seed", "1", "--no-color"],
            env={**os.environ, "SCHEMATHESIS_HOOKS": "made_images", "PYTHONPATH": PATH}, cwd=tmp_path,
            capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "No issues found" in done.stdout
    (count,) = re.findall(r"(\d+) generated, \1 passed", done.stdout)
    assert int(count) > 30

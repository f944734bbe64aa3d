"""The application: what it answers, what it refuses, and that answers do not depend on who else asks."""

import asyncio
import io
import json
import re
import shutil
import sys
import threading
import time

import numpy as np
import pytest
import torch
from bombs import bomb
from PIL import Image
from starlette.testclient import TestClient

import peerbayes as pb
from peerbayes.api.fitting import fit
from peerbayes.errors import InputError
from peerbayes.serving.app import make_app
from peerbayes.serving.batching import Batcher
from peerbayes.serving.limits import Limits
from peerbayes.serving.served import Served

CPU = torch.device("cpu")


def client_of(run, **limits):
    served = Served.open(run.folder, device="cpu")
    return TestClient(make_app(served, Limits(**limits)), base_url="http://127.0.0.1", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(certified):
    with client_of(certified) as client:
        yield client


@pytest.fixture(scope="module")
def asking(texts):
    with client_of(texts) as client:
        yield client


def png(pixels, form="PNG", **options):
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file := io.BytesIO(), form, **options)
    return file.getvalue()


def digits(count):
    images, _ = pb.data.load("digits").test.batch(torch.arange(count), CPU)
    return images[:, 0].numpy()


def asked(client, *images):
    """Return the predictions of named images."""
    answer = client.post("/predict", files=[("images", image) for image in images])
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def refusal(answer, status):
    """Return the sentence of an answer that refuses."""
    assert answer.status_code == status, answer.text
    (detail,) = answer.json().values()
    assert set(answer.json()) == {"detail"}
    assert detail
    assert "Traceback" not in detail
    return detail


# ---- what is answered ------------------------------------------------------------------------------------------------


def test_answers_are_the_predictions_of_the_run(certified, client):
    images = digits(20)
    said = asked(client, *((f"{number}.png", png(image), "image/png") for number, image in enumerate(images)))
    level = certified.certificate
    wanted = certified.predict([Image.fromarray(one) for one in images], coverage=0.95, risk=0.01, device="cpu")
    assert (level.coverage.level, level.risk.level) == (0.95, 0.01)
    for one, record in zip(said, wanted.records(), strict=True):
        assert [one["class"], one["set"], one["abstain"]] == [record["class"], record["set"], record["abstain"]]
        assert one["probability"] == pytest.approx(record["probability"], abs=1e-6)
        assert one["entropy"] == pytest.approx(record["entropy"], abs=1e-6)
        assert one["probabilities"] == pytest.approx(record["probabilities"], abs=1e-6)
    assert [one["input"] for one in said] == [f"{number}.png" for number in range(20)]


def test_answers_say_why(certified, client):
    noise = np.random.default_rng(0).integers(0, 255, (30, 8, 8))
    said = asked(client, *(("x.png", png(image)) for image in [*noise[:20], *digits(12)]))
    threshold = certified.certificate.risk.thresholds[0]
    assert {one["abstain"] for one in said} == {True, False}
    for one in said:
        assert one["abstain"] == (one["probability"] < threshold)
        begin = "It abstains" if one["abstain"] else "It answers"
        entropy, disagreement, answered, sets = one["explanation"]
        assert answered == (
            f"{begin}: the probability of '{one['class']}' is {one['probability']:.4g}, and from {threshold:.4g} on at "
            "most 1 % of answers are wrong (promised with probability 0.9, shown on 450 inputs)."
        )
        assert entropy.startswith(f"Entropy {one['entropy']:.3f} nats: as unsure as a choice among ")
        assert "nothing could disagree" in disagreement
        assert "hold the true class with probability 0.95" in sets


def test_without_a_promise_it_says_how_to_make_one(pair):
    with client_of(pair) as client:
        (one,) = asked(client, ("a.png", png(digits(1)[0])))
        about = client.get("/model").json()
    assert one["abstain"] is None
    assert one["set"] is None
    assert one["explanation"][2].startswith("It never abstains: no risk is promised of its answers. `peerbayes calib")
    assert "`peerbayes calibrate RUN --coverage .9 --risk .05` makes promises" in one["explanation"][2]
    assert one["explanation"][3] == "There is no set of classes: no coverage is promised."  # how is told once
    assert 0 < one["disagreement"] <= one["entropy"]
    assert "6 networks differ" in one["explanation"][1]
    assert about["certificate"] is None
    assert about["promises"] == []
    assert about["passes"] == 6
    assert about["networks"] == {"a": "mlp", "b": "mlp"}


def test_the_model_is_told_without_places_of_files(certified, pair, client, tmp_path):
    about = client.get("/model").json()
    assert about["name"] == "digits"
    assert about["takes"] == "images"
    assert about["classes"] == [str(number) for number in range(10)]
    assert about["certificate"]["risk"]["level"] == 0.01
    assert about["promises"] == certified.certificate.describe(about["classes"])
    record = json.loads((certified.folder / "evaluation.json").read_text())["peers"][0]
    assert about["figures"]["accuracy"] == record["accuracy"]
    assert record["temperature"] != pytest.approx(about["temperature"], rel=1e-3)  # certifying fitted another one
    assert "calibrated nll" not in about["figures"]
    folder = shutil.copytree(certified.folder, tmp_path / "digits")
    judged = json.loads((folder / "evaluation.json").read_text())
    judged["peers"][0]["temperature"] = about["temperature"]
    (folder / "evaluation.json").write_text(json.dumps(judged))
    with client_of(pb.load(folder)) as other:
        assert other.get("/model").json()["figures"]["calibrated nll"] == record["cnll"]
    assert client.get("/health").json() == {"status": "ok", "requests": 0}
    with client_of(pair) as other:
        told = other.get("/model").text + other.get("/openapi.json").text + other.get("/").text
    assert "/small" not in told
    assert str(pair.folder.parent) not in told


def test_texts_are_never_taken_for_files(texts, asking, tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("goal\nteam\ncup\n")
    wanted = texts.predict(["goal cup", "stock fund today"], device="cpu")
    answer = asking.post("/predict", json={"texts": ["goal cup", "stock fund today", str(path), "/etc/passwd"]})
    said = answer.json()["predictions"]
    assert [one["input"] for one in said] == ["goal cup", "stock fund today", str(path), "/etc/passwd"]
    for one, record in zip(said, wanted.records(), strict=False):
        assert one["probabilities"] == pytest.approx(record["probabilities"], abs=1e-6)
    vocabulary = texts.vocabulary  # words of the path itself, not those in the file
    tokens = vocabulary.encode([str(path)])
    alone = texts["a"].predict(tokens, 1).probabilities[0].tolist()
    assert list(said[2]["probabilities"].values()) == pytest.approx(alone, abs=1e-6)
    assert asking.get("/model").json()["takes"] == "texts"


def test_a_text_without_words_is_answered(asking):
    said = asking.post("/predict", json={"texts": [" ", "\x00", "\u2028", "𝒳"]}).json()["predictions"]
    assert all(sum(one["probabilities"].values()) == pytest.approx(1, abs=1e-5) for one in said)


def test_every_format_of_images_is_taken(client):
    pixels = np.repeat(digits(1)[0][:, :, None], 3, axis=2)
    lossless = {form: png(pixels, form) for form in ("PNG", "BMP", "TIFF", "PPM", "GIF")}
    lossless["WEBP"] = png(pixels, "WEBP", lossless=True)
    said = asked(client, *((f"a.{form}", data) for form, data in lossless.items()))
    assert len({one["probability"] for one in said}) <= 2  # but for GIF's palette
    assert {one["class"] for one in said} == {said[0]["class"]}
    assert asked(client, ("a.jpg", png(pixels, "JPEG", quality=95)))[0]["class"] == said[0]["class"]


# ---- batches ---------------------------------------------------------------------------------------------------------


def kinds(certified, pair, tmp_path_factory):
    yield certified
    yield pair
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(144, 3)
    )
    images, labels = torch.rand(24, 1, 8, 8), torch.arange(24) % 3
    data = pb.data.from_arrays((images, labels), (images, labels))
    dropped = pb.MCDropout(net)
    yield fit({"a": dropped}, data=data, recipe="plain", run=tmp_path_factory.mktemp("dropout") / "run",
              overrides=["stages.*.epochs=1", "stages.*.warmup=0"], device="cpu")  # fmt: skip


def test_an_answer_does_not_depend_on_the_batch(certified, pair, tmp_path_factory):
    for run in kinds(certified, pair, tmp_path_factory):
        served = Served(run, list(run), None, CPU)
        images = torch.stack([served.image(Image.fromarray(one)) for one in digits(40)])
        alone = [served.predict(one[None]) for one in images]
        for size in (2, 7, 40):
            for part, ones in zip(
                images.split(size), [alone[at : at + size] for at in range(0, 40, size)], strict=True
            ):
                together = served.predict(part)
                for key in ("probabilities", "entropy", "disagreement"):
                    torch.testing.assert_close(
                        getattr(together, key), torch.cat([getattr(one, key) for one in ones]), rtol=0, atol=1e-6
                    )


class Recording:
    """Predicts as a run does, after a moment, and remembers the sizes of batches."""

    def __init__(self, served, refuse=None):
        self.predict, self.sizes, self.refuse = served.predict, [], refuse
        self.go = threading.Event()
        self.go.set()

    def __call__(self, inputs):
        assert self.go.wait(30)
        self.sizes.append(len(inputs))
        if self.refuse is not None and any(torch.equal(one, self.refuse) for one in inputs):
            raise InputError("this one can't be predicted")
        return self.predict(inputs)


def test_requests_that_arrive_together_are_one_batch(pair):
    served = Served(pair, list(pair), None, CPU)
    images = [served.image(Image.fromarray(one)) for one in digits(12)]
    alone = [served.predict(one[None]).probabilities for one in images]
    predict = Recording(served, refuse=images[3])

    async def ask():
        batcher = Batcher(predict, most=8, wait=0.2)
        async with batcher.running():
            one = [batcher([image]) for image in images]
            return await asyncio.gather(*one, batcher(images[4:6]), return_exceptions=True)

    *said, both = asyncio.run(ask())
    assert predict.sizes[:1] == [8]
    assert predict.sizes[1:9] == [1] * 8  # one of which can't be predicted
    assert predict.sizes[9:] == [6]
    assert str(said.pop(3)) == "this one can't be predicted"
    for one, wanted in zip(said, [*alone[:3], *alone[4:]], strict=True):
        torch.testing.assert_close(one.probabilities, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(both.probabilities, torch.cat(alone[4:6]), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:layer '1' is batch-norm without")
def test_networks_that_look_at_the_batch_are_asked_one_by_one(tmp_path):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4, track_running_stats=False), torch.nn.Flatten(),
        torch.nn.Linear(144, 3),
    )  # fmt: skip
    images, labels = torch.rand(24, 1, 8, 8), torch.arange(24) % 3
    run = fit({"a": pb.Point(net)}, data=pb.data.from_arrays((images, labels), (images, labels)), recipe="plain",
              run=tmp_path / "run", overrides=["stages.*.epochs=1", "stages.*.warmup=0"], device="cpu")  # fmt: skip
    served = Served(run, ["a"], None, CPU)
    assert served.joint
    app = make_app(served, Limits(wait=0.2))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        several = asked(client, *(("a.png", png(image)) for image in digits(3)))
        alone = [asked(client, ("a.png", png(image)))[0] for image in digits(3)]
    assert app.state.batcher.batches == [1] * 6
    assert several == alone


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_bombs_are_refused_before_they_are_decoded(client, monkeypatch):
    loaded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: loaded.append(self.size))
    for data in (bomb(30_000, 30_000), bomb(8_000, 8_000), bomb(100_000, 100_000)):
        answer = client.post("/predict", files={"images": ("b.png", data)})
        assert refusal(answer, 413) == "b.png: has more than 50,000,000 pixels, which is as much as is decoded"
    answer = client.post("/predict", files={"images": ("b.png", bomb(40_000_000, 1))})
    assert refusal(answer, 422) == ("b.png: is 40000000 by 1 pixels, expected no side more than 100 times the other")
    assert loaded == []


def test_a_jpeg_of_too_many_scans_is_refused(client):
    data = png(np.zeros((8, 8)), "JPEG", progressive=True)
    begin, end = data.index(b"\xff\xda"), data.rindex(b"\xff\xd9")
    many = data[:begin] + data[begin:end] * 400 + data[end:]
    assert asked(client, ("a.jpg", data))
    assert "more than 200 scans" in refusal(client.post("/predict", files={"images": ("a.jpg", many)}), 413)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP"])
def test_damaged_images_are_one_sentence(client, form):
    whole = png(np.random.default_rng(0).integers(0, 255, (24, 24, 3)), form)
    chance = np.random.default_rng(1)
    for _ in range(40):
        data = bytearray(whole)
        for place in chance.integers(0, len(data), 4):
            data[place] = chance.integers(0, 256)
        data = data[: chance.integers(1, len(data) + 1)] if chance.random() < 0.5 else data
        answer = client.post("/predict", files={"images": ("a", bytes(data))})
        assert answer.status_code in (200, 413, 415, 422), answer.text
        assert answer.status_code == 200 or refusal(answer, answer.status_code).startswith("a: ")


def test_what_is_no_image_is_refused(client):
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/etc/passwd) (r) file\nshowpage\n"
    for data in (b"", b"\0", svg, postscript, b"PK\x03\x04", b"\x80\x04K\x01."):
        answer = client.post("/predict", files={"images": ("x.png", data, "image/png")})
        assert refusal(answer, 415).startswith("x.png: is not an image that is known (expected JPEG, PNG, WEBP")
    deep = Image.fromarray(np.zeros((8, 8), np.int32))
    deep.save(file := io.BytesIO(), "TIFF")
    answer = client.post("/predict", files={"images": ("x.tif", file.getvalue())})
    assert refusal(answer, 422) == "x.tif: expected an image of 8 bits a channel, got mode I"


BOUNDARY = "multipart/form-data; boundary=x"


def part(name="images", filename="a.png", data=b"x", end=b"--x--\r\n"):
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'
    return head.encode("latin-1") + data + b"\r\n" + end


@pytest.mark.parametrize(
    ("content_type", "body", "status", "sentence"),
    [
        (None, b"x", 415, "expected a body of type multipart/form-data, got no content type"),
        ("image/png", b"x", 415, "expected a body of type multipart/form-data, got 'image/png'"),
        ("application/json", b'{"texts": ["a"]}', 415,
         "expected a body of type multipart/form-data, got 'application/json'"),
        ("multipart/form-data", b"x", 400, "the form can't be read: its content type names no boundary"),
        (BOUNDARY, b"not a form", 400, None),
        (BOUNDARY, b"", 400, "the form can't be read: it ends before its last boundary"),
        (BOUNDARY, part(end=b"--y"), 400, None),
        (BOUNDARY, part(end=b""), 400, "the form can't be read: it ends before its last boundary"),
        (BOUNDARY, b"--x--\r\n", 422, "expected at least one file in the field 'images'"),
        (BOUNDARY, part(name="other"), 422, "expected files in the field 'images', got a field 'other'"),
        (BOUNDARY, b'--x\r\nContent-Disposition: form-data; name="images"\r\n\r\ntext\r\n--x--\r\n', 415,
         "image 0: is not an image that is known (expected JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM)"),
        (BOUNDARY, b"--x\r\nContent-Disposition: form-data\r\n\r\ntext\r\n--x--\r\n", 422, None),
        (BOUNDARY, b"--x\r\nA: b\r\n\r\ntext\r\n--x--\r\n", 422, None),
        (BOUNDARY, b"--x\r\n" + b"A: b\r\n" * 1000 + b"\r\ntext\r\n--x--\r\n", 400, None),
        (BOUNDARY + "; charset=idna", part(), 415, None),
        (BOUNDARY + "; charset=undefined", part(), 415, None),
        ("multipart/form-data; boundary=\xff", part(), 400, None),
        ("multipart/form-data; boundary=" + "x" * 5000, part(), 400, None),
        ("multipart/form-data; boundary=", part(), 400, None),
    ],
)  # fmt: skip
def test_other_bodies_are_refused(client, content_type, body, status, sentence):
    headers = {} if content_type is None else {"Content-Type": content_type.encode("latin-1")}
    answer = client.post("/predict", content=body, headers=headers)
    detail = refusal(answer, status)
    assert sentence is None or detail == sentence


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "C:\\x.png", "\xff\xfe\x1b[31m", "a" * 1000,
                                  "%2e%2e/%00", "<img src=x>", ""])  # fmt: skip
def test_names_are_told_and_nothing_else(client, name, monkeypatch):
    opened = []
    monkeypatch.setattr("peerbayes.data.splits.open_rgb", opened.append)
    body = part(filename=name, data=png(digits(1)[0]))
    answer = client.post("/predict", content=body, headers={"Content-Type": BOUNDARY})
    (one,) = answer.json()["predictions"]
    told = name.removeprefix("C:\\")[:200].replace("\x1b", "\\u001b")
    assert one["input"] == (re.sub("[\xfe\xff]", "\ufffd", told) or "image 0")
    assert opened == []


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "the body is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"{", 400, None),
        (b"[" * 100_000, 400, None),
        (b"1" * 5000, 400, None),
        (b"\xff\xfe\xff", 400, None),
        (b"[]", 422, "the body: input should be a table with keys texts, got []"),
        (b"NaN", 422, None),
        (b"{}", 422, "the body: 'texts' is missing"),
        (b'{"texts": []}', 422, None),
        (b'{"texts": "a"}', 422, "the body: texts: input should be a valid list, got 'a'"),
        (b'{"texts": [NaN]}', 422, None),
        (b'{"texts": [1]}', 422, None),
        (b'{"texts": [null]}', 422, None),
        (b'{"texts": [""]}', 422, None),
        (b'{"texts": ["\\ud800"]}', 422, None),
        (b'{"texts": ["a"], "draws": 3}', 422, "the body: has no key 'draws'; known: texts"),
        (b'{"text": ["a"]}', 422, None),
    ],
)
def test_other_json_is_refused(asking, body, status, sentence):
    answer = asking.post("/predict", content=body, headers={"Content-Type": "application/json"})
    detail = refusal(answer, status)
    assert sentence is None or detail == sentence
    assert len(detail) <= 420


def test_what_is_too_much_is_refused(certified, texts, pair):
    with client_of(texts, items=2, characters=10, body=2000) as client:
        answer = client.post("/predict", json={"texts": ["a", "b", "c"]})
        assert refusal(answer, 422) == "expected at most 2 texts, got 3"
        answer = client.post("/predict", json={"texts": ["a", "b" * 11]})
        assert refusal(answer, 422) == "text 1 has 11 characters, expected at most 10"
        answer = client.post("/predict", json={"texts": ["a" * 3000]})
        large = "the body is larger than 2,000 bytes, which is as much as is taken at once"
        assert refusal(answer, 413) == large
        unsaid = client.post("/predict", content=iter([b"x" * 1500] * 2), headers={"Content-Type": "application/json"})
        assert refusal(unsaid, 413) == large
        lied = {"Content-Type": "application/json", "Content-Length": "9" * 30}
        assert refusal(client.post("/predict", content=b"x", headers=lied), 413) == large
    with client_of(pair, items=2) as client:
        answer = client.post("/predict", files=[("images", ("a.png", png(digits(1)[0])))] * 3)
        assert refusal(answer, 422) == "expected at most 2 images, got more"
        assert len(asked(client, *[("a.png", png(digits(1)[0]))] * 2)) == 2


def test_uploads_stay_in_memory(pair):
    opened = []

    def opening(event, arguments):
        if event == "open" and watching and isinstance(arguments[0], str | bytes):
            opened.append(arguments[0])

    watching = False
    sys.addaudithook(opening)
    data = png(np.random.default_rng(0).integers(0, 255, (1000, 1000, 3)))
    assert len(data) > 2 << 20
    with client_of(pair) as client:
        asked(client, ("a.png", data))  # which imports what it needs
        watching = True
        asked(client, ("/etc/passwd", data))
        watching = False
    assert opened == []


def test_too_many_requests_are_told_to_come_again(pair):
    served = Served(pair, list(pair), None, CPU)
    predict = Recording(served)
    object.__setattr__(served, "predict", predict)
    data = {"images": ("a.png", png(digits(1)[0]))}
    with TestClient(make_app(served, Limits(requests=2, seconds=20)), base_url="http://127.0.0.1") as client:
        predict.go.clear()
        said = []
        threads = [threading.Thread(target=lambda: said.append(client.post("/predict", files=data))) for _ in range(2)]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + 20
        while client.get("/health").json()["requests"] < 2:
            assert time.monotonic() < ends
        answer = client.post("/predict", files=data)
        assert refusal(answer, 503) == "2 requests are in hand, which is as many as are taken; try again later"
        assert answer.headers["retry-after"] == "1"
        predict.go.set()
        for thread in threads:
            thread.join()
        assert [one.status_code for one in said] == [200, 200]
        assert client.post("/predict", files=data).status_code == 200


def test_a_request_that_takes_too_long_is_given_up(pair):
    served = Served(pair, list(pair), None, CPU)
    predict = Recording(served)
    object.__setattr__(served, "predict", predict)
    data = {"images": ("a.png", png(digits(1)[0]))}
    with TestClient(make_app(served, Limits(seconds=0.2)), base_url="http://127.0.0.1") as client:
        predict.go.clear()
        answer = client.post("/predict", files=data)
        assert refusal(answer, 503) == "there was no answer within 0.2 s; try again later"
        assert "retry-after" in answer.headers
        predict.go.set()
    assert len(predict.sizes) <= 1


def test_faults_of_the_program_are_told_without_their_insides(pair):
    served = Served(pair, list(pair), None, CPU)

    def broken(inputs):
        raise RuntimeError("/home/somebody/secret")

    object.__setattr__(served, "predict", broken)
    with TestClient(make_app(served), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        answer = client.post("/predict", files={"images": ("a.png", png(digits(1)[0]))})
        assert refusal(answer, 500) == "the answer could not be made (RuntimeError)"


# ---- around it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nothing", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page.html", "/docs",
                                  "/static/x", "//etc/passwd", "/model/", "/predict/../model%00"])  # fmt: skip
def test_no_path_reaches_a_file(client, path):
    assert refusal(client.get(path), 404).startswith("there is no such page")


def test_other_methods_are_refused(client):
    for method, path in (("GET", "/predict"), ("POST", "/model"), ("DELETE", "/health"), ("OPTIONS", "/predict")):
        answer = client.request(method, path)
        assert refusal(answer, 405).startswith(f"{method} is not answered here")
        assert answer.headers["allow"]


def test_other_hosts_are_refused(certified, client):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        answer = client.get("/model", headers={"Host": host})
        assert refusal(answer, 400).startswith("this server is asked for as 127.0.0.1 or localhost")
    for host in ("127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:80"):
        assert client.get("/model", headers={"Host": host}).status_code == 200
    anywhere = make_app(Served.open(certified.folder, device="cpu"), hosts=None)
    with TestClient(anywhere, base_url="http://my.server") as other:
        assert other.get("/model").status_code == 200


def test_the_page_may_do_what_it_does_and_nothing_else(client):
    answer = client.get("/")
    policy = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert answer.text.count("<script") == answer.text.count("<style") == 1
    assert "http" not in answer.text  # nothing from elsewhere
    for path in ("/", "/model", "/nothing"):
        assert client.get(path).headers["x-content-type-options"] == "nosniff"


def test_openapi_says_what_a_body_holds(client, asking):
    for one, kind, field in ((client, "multipart/form-data", "images"), (asking, "application/json", "texts")):
        said = one.get("/openapi.json").json()
        predict = said["paths"]["/predict"]["post"]
        assert set(predict["requestBody"]["content"]) == {kind}
        schema = predict["requestBody"]["content"][kind]["schema"]
        assert schema["required"] == [field]
        assert schema["properties"][field]["maxItems"] == 32
        assert {"200", "400", "413", "415", "422", "503"} == set(predict["responses"])
        assert "class" in said["components"]["schemas"]["Answer"]["properties"]

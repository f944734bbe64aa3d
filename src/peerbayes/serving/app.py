"""The application: one page, and a JSON API that describes itself."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

import peerbayes
from peerbayes.data.splits import FORMATS
from peerbayes.inference.prediction import Prediction
from peerbayes.serving.batching import Batcher
from peerbayes.serving.explaining import answers
from peerbayes.serving.limits import Limits, Refused
from peerbayes.serving.reading import FIELD, IMAGES, TEXTS, decoded, images_of, read_body, texts_of
from peerbayes.serving.served import Served

READERS = min(4, os.cpu_count() or 1)  # images that are decoded at once, each in the memory of all its pixels
LOCAL = ("127.0.0.1", "localhost", "::1")


class Answer(BaseModel):
    """What is said of one image or text."""

    input: str = Field(description="The file's name, or the text.")
    label: str = Field(alias="class", description="The most probable class.")
    probability: float = Field(description="Its probability.", ge=0, le=1)
    entropy: float = Field(description="How unsure the answer is altogether, in nats.", ge=0)
    disagreement: float = Field(
        description="The part of it in which draws and peers differ (mutual information), in nats.", ge=0
    )
    set: list[str] | None = Field(
        description="Classes that hold the true one as often as is promised; null without a promise."
    )
    abstain: bool | None = Field(
        description="Whether the answer should not be given, so that few of those given are wrong; null "
        "without a promise."
    )
    probabilities: dict[str, float] = Field(description="Of all classes.")
    explanation: list[str] = Field(description="The same in plain words.")


class Answers(BaseModel):
    """What is said of each image or text of a request, in order."""

    predictions: list[Answer]


class About(BaseModel):
    """What is served."""

    name: str
    takes: str = Field(description="images or texts")
    shape: list[int] = Field(description="Channels, height and width of an image, or tokens of a text.")
    classes: list[str]
    networks: dict[str, str] = Field(description="By peer.")
    posteriors: dict[str, str] = Field(description="By peer.")
    recipe: dict[str, str]
    data: str
    seed: int
    draws: int = Field(description="Of each peer.")
    passes: int = Field(description="Networks that an answer is the average of.")
    temperature: float
    figures: dict[str, float] | None = Field(description="On its test split; null where it was not evaluated.")
    certificate: dict[str, Any] | None = Field(description="What is promised, and on what that was shown.")
    promises: list[str] = Field(description="The same in sentences.")
    limits: dict[str, float] = Field(description="What a request may hold.")
    version: str


class Health(BaseModel):
    """That requests are answered."""

    status: str
    requests: int = Field(description="In hand now.")


class Fault(BaseModel):
    """Why a request is not answered."""

    detail: str


FAULTS = {
    400: "The body can't be read, or the host is another one.",
    413: "More bytes or pixels than are taken.",
    415: "Another type of body, or no image that is known.",
    422: "Something else than was expected.",
    503: "Too many requests are in hand, or the answer took too long: come again.",
}


def make_app(served: Served, limits: Limits | None = None, hosts: Sequence[str] | None = LOCAL) -> FastAPI:
    """Return an ASGI application that serves a run.

    Args:
        served: the run.
        limits: what it takes.
        hosts: names by which it may be asked for, so that no page of another site reaches it by a name of its own; None
            for any.
    """
    limits = limits or Limits()
    batcher = Batcher(served.predict, 1 if served.joint else limits.batch, limits.wait)
    readers = ThreadPoolExecutor(READERS, "peerbayes-serve-read")
    about, passes = served.about(limits), served.passes
    in_hand = _InHand(limits.requests)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with batcher.running():
            yield
        readers.shutdown(cancel_futures=True)

    faults: dict[int | str, dict[str, Any]] = {
        status: {"model": Fault, "description": text} for status, text in FAULTS.items()
    }
    app = FastAPI(
        title=f"peerbayes: {about['name']}",
        version=peerbayes.__version__,
        lifespan=lifespan,
        docs_url=None,  # pages that load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.batcher = batcher
    page, policy = _page()

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/health", response_model=Health, responses={400: faults[400]})
    async def health() -> JSONResponse:
        """Say that requests are answered."""
        return JSONResponse({"status": "ok", "requests": in_hand.count})

    @app.get("/model", response_model=About, responses={400: faults[400]})
    async def model() -> JSONResponse:
        """Say what is served."""
        return JSONResponse(about)

    async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(readers, call, *arguments)

    def read_texts(body: bytes) -> tuple[list[str], list[Tensor]]:
        texts = texts_of(body, limits)
        return texts, [served.text(text) for text in texts]

    def read_image(name: str, data: bytes) -> Tensor:
        return served.image(decoded(name, data, limits))

    async def given(request: Request) -> tuple[list[str], list[Tensor]]:
        body = await read_body(request, TEXTS if served.texts else IMAGES, limits)
        if served.texts:
            names, inputs = await in_thread(read_texts, body)
        else:
            named = await in_thread(images_of, body, request.headers["content-type"], limits)
            names = [name for name, _ in named]
            inputs = list(await asyncio.gather(*(in_thread(read_image, *image) for image in named)))
        return names, inputs

    @app.post("/predict", response_model=Answers, responses=faults, openapi_extra=_body(served, limits))
    async def predict(request: Request) -> JSONResponse:
        """Predict images or texts, whichever the network takes."""
        with in_hand.admit():
            try:
                async with asyncio.timeout(limits.seconds):
                    names, inputs = await given(request)
                    prediction: Prediction = await batcher(inputs)
            except TimeoutError:
                raise Refused(503, f"there was no answer within {limits.seconds:g} s; try again later") from None
            named = zip(names, answers(prediction, passes), strict=True)
            return JSONResponse({"predictions": [{**answer, "input": name} for name, answer in named]})

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def not_there(request: Request, error: HTTPException) -> JSONResponse:
        pages = "there are /, /predict, /health, /model and /openapi.json"
        messages = {404: f"there is no such page; {pages}", 405: f"{request.method} is not answered here; {pages}"}
        detail = messages.get(error.status_code, str(error.detail))
        return JSONResponse({"detail": detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"the answer could not be made ({type(error).__name__})"}, 500, _HEADERS)

    app.add_middleware(_Guard, hosts=hosts)
    return app


_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class _Guard:
    """Answers nobody who asks for another host, and tells browsers to trust no answer with more than it needs.

    Args:
        app: what answers.
        hosts: names of this server; None for any.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).strip("[]").lower()
        if self.hosts is not None and host not in self.hosts:
            detail = f"this server is asked for as {' or '.join(self.hosts)} alone"
            await JSONResponse({"detail": detail}, 400)(scope, receive, guarded)
        else:
            await self.app(scope, receive, guarded)


class _InHand:
    """Counts the requests that are in hand, and refuses one too many.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request within the block."""
        if self.count >= self.most:
            raise Refused(503, f"{self.most} requests are in hand, which is as many as are taken; try again later")
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


def _page() -> tuple[str, str]:
    """Return the page, and the policy under which it runs its own script and nothing else."""
    page = resources.files("peerbayes.serving").joinpath("page.html").read_text("utf-8")
    hashes = {
        tag: base64.b64encode(hashlib.sha256(block[1].encode()).digest()).decode()
        for tag in ("script", "style")
        if (block := re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)) is not None
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _body(served: Served, limits: Limits) -> dict[str, Any]:
    """Return what OpenAPI says of a request's body."""
    text = {"type": "string", "minLength": 1, "maxLength": limits.characters}
    kind, field, item = (
        (TEXTS, "texts", text) if served.texts else (IMAGES, FIELD, {"type": "string", "format": "binary"})
    )
    schema = {
        "type": "object",
        "required": [field],
        "properties": {field: {"type": "array", "minItems": 1, "maxItems": limits.items, "items": item}},
        "additionalProperties": False,
    }
    media: dict[str, Any] = {"schema": schema}
    if not served.texts:
        Image.init()  # which fills in the names
        media["encoding"] = {field: {"contentType": ", ".join(Image.MIME[name] for name in FORMATS)}}
    return {"requestBody": {"required": True, "content": {kind: media}}}

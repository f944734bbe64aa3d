"""Requests as inputs: bodies within limits, in memory alone, of images that are decoded or texts."""

from __future__ import annotations

import io
import json
import re
from typing import Annotated, Any

from fastapi import Request
from PIL import Image, UnidentifiedImageError
from pydantic import Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from peerbayes.data.splits import FORMATS, decode_rgb
from peerbayes.errors import InputError, printable
from peerbayes.schema import Strict
from peerbayes.serving.limits import Limits, Refused

FIELD = "images"  # of a form
IMAGES, TEXTS = "multipart/form-data", "application/json"
NAME = 200  # characters of a file's name that are told again
SCANS = 200  # of a JPEG; progressive ones have about ten, and each is a pass over all pixels
SIDES = 100  # times that an image may be longer than wide: its shortest side is what it is resized by
_SCAN = re.compile(rb"\xff\xda")


class TextsBody(Strict):
    """The body of a request for texts."""

    texts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


async def read_body(request: Request, kind: str, limits: Limits) -> bytes:
    """Return the body of a request; refuse another type, and more than may be sent.

    Args:
        request: the request.
        kind: the media type that is expected.
        limits: of the server.
    """
    given, _ = parse_options_header(request.headers.get("content-type"))
    if given.decode("latin-1") != kind:
        sent = f"'{printable(given.decode('latin-1'))[:NAME]}'" if given else "no content type"
        raise Refused(415, f"expected a body of type {kind}, got {sent}")
    too_large = Refused(413, f"the body is larger than {limits.body:,} bytes, which is as much as is taken at once")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.body:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limits.body:
                raise too_large
    except ClientDisconnect:
        raise Refused(400, "the connection was closed before the end of the body") from None
    return bytes(body)


def images_of(body: bytes, content_type: str, limits: Limits) -> list[tuple[str, bytes]]:
    """Return names and bytes of the images of a form; nothing is decoded.

    Args:
        body: a multipart form whose field ``images`` may be repeated.
        content_type: which names the form's boundary.
        limits: of the server.
    """
    _, options = parse_options_header(content_type)
    form = _Form(limits.items)
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks)
        parser.write(body)
    except KeyError:
        raise Refused(400, "the form can't be read: its content type names no boundary") from None
    except FormParserError as error:
        raise Refused(400, f"the form can't be read: {_short(str(error))}") from None
    if not form.whole:
        raise Refused(400, "the form can't be read: it ends before its last boundary")
    if not form.parts:
        raise Refused(422, f"expected at least one file in the field '{FIELD}'")
    return [(shown_name(name, number), bytes(data)) for number, (name, data) in enumerate(form.parts)]


class _Form:
    """The files of a multipart form, in memory; nothing of it goes to the disk, as other parsers' parts would.

    Args:
        most: files.
    """

    def __init__(self, most: int) -> None:
        self.most, self.whole = most, False
        self.parts: list[tuple[str, bytearray]] = []
        self._headers: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()

    @property
    def callbacks(self) -> Any:
        """What a parser calls."""
        names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "end")
        return {f"on_{name}": getattr(self, f"_{name}") for name in names}

    def _part_begin(self) -> None:
        self._headers = {}

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field != FIELD:
            raise Refused(422, f"expected files in the field '{FIELD}', got a field '{_short(field)}'")
        if len(self.parts) == self.most:
            raise Refused(422, f"expected at most {self.most} images, got more")
        self.parts.append((options.get(b"filename", b"").decode("utf-8", "replace"), bytearray()))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1][1].extend(memoryview(data)[start:end])

    def _end(self) -> None:
        self.whole = True


def texts_of(body: bytes, limits: Limits) -> list[str]:
    """Return the texts of a JSON object.

    Args:
        body: ``{"texts": [...]}``.
        limits: of the server.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON ({error})") from None
    try:
        texts = TextsBody.parse(given, "the body").texts
    except InputError as error:
        raise Refused(422, _short(str(error))) from None
    if len(texts) > limits.items:
        raise Refused(422, f"expected at most {limits.items} texts, got {len(texts):,}")
    for number, text in enumerate(texts):
        if len(text) > limits.characters:
            raise Refused(422, f"text {number} has {len(text):,} characters, expected at most {limits.characters:,}")
    return texts


def decoded(name: str, data: bytes, limits: Limits) -> Image.Image:
    """Return an image in RGB; refuse what is none, and what would be too large, before it is decoded.

    Args:
        name: its name, which begins the sentence.
        data: its bytes.
        limits: of the server.
    """
    too_large = Refused(413, f"{name}: has more than {limits.pixels:,} pixels, which is as much as is decoded")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except UnidentifiedImageError:
        raise Refused(415, f"{name}: is not an image that is known (expected {', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large from None
    except Exception as error:  # decoders raise many types on broken files
        raise Refused(422, f"{name}: cannot be decoded as an image ({type(error).__name__})") from None
    if width * height > limits.pixels:
        raise too_large
    if max(width, height) > SIDES * min(width, height):
        raise Refused(422, f"{name}: is {width} by {height} pixels, expected no side more than {SIDES} times the other")
    if data.startswith(b"\xff\xd8") and len(_SCAN.findall(data)) > SCANS:
        raise Refused(413, f"{name}: has more than {SCANS} scans, each of which is a pass over all of its pixels")
    try:
        return decode_rgb(io.BytesIO(data), name)
    except InputError as error:
        raise Refused(422, _short(str(error))) from None


def shown_name(given: str, number: int) -> str:
    """Return what an image is called in answers: the name that came with it, which no file is looked for by.

    Args:
        given: that came with it; may be empty.
        number: its place in the request.
    """
    return printable(given)[:NAME] or f"image {number}"


def _short(sentence: str, most: int = 400) -> str:
    """Return a sentence in which a value that was sent does not drown the rest, as valid UTF-8."""
    sentence = printable(sentence).encode("utf-8", "replace").decode()
    return sentence if len(sentence) <= most else f"{sentence[: most - 1]}…"

"""What a server takes, and what it says to what it does not take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from peerbayes.schema import PositiveFloat, PositiveInt, Strict

MOST_PIXELS = 178_956_970  # more than which Pillow opens no image


class Limits(Strict):
    """What one server takes, so that nobody can take all of its machine.

    Attributes:
        body: most bytes of a request.
        pixels: most pixels of an image, as it would be decoded.
        items: most images or texts of a request.
        characters: most characters of a text.
        requests: most requests that are in hand at once; others are told to come again.
        seconds: most that a request may take, from its first byte to its answer.
        batch: most images or texts of a forward pass.
        wait: seconds that the first of a batch waits for others.

    Example:
        >>> from peerbayes.serving.limits import Limits
        >>> Limits(items=4).items
        4
    """

    body: PositiveInt = 16 << 20
    pixels: Annotated[int, Field(gt=0, le=MOST_PIXELS)] = 50_000_000
    items: PositiveInt = 32
    characters: PositiveInt = 20_000
    requests: PositiveInt = 64
    seconds: PositiveFloat = 30.0
    batch: PositiveInt = 64
    wait: Annotated[float, Field(ge=0, le=1)] = 0.002


class Refused(Exception):
    """A request that is not answered.

    Args:
        status: the HTTP status.
        detail: why, in a sentence.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the status: when to come again, and that the rest of a body is not read."""
        closed = {"Connection": "close"} if self.status in (413, 415, 503) else {}
        return closed | ({"Retry-After": "1"} if self.status == 503 else {})

r"""Turn texts into rows of token numbers, the same on every machine, and read word vectors to start from.

Words are the matches of ``\w+|[^\w\s]`` in the lower-cased text: runs of letters, digits and underscores, and single
other marks. Token 0 is padding, 1 an unknown word, then come the words by falling count, then the buckets of n-grams.
Characters are those of Zhang et al. (2015): token ``i`` is the ``i``-th of their alphabet of 70, and every other
character is 0, as padding is. Pieces are those of a Hugging Face tokenizer, with its numbers, marks and padding.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerbayes.errors import InputError, nearest
from peerbayes.networks.inputs import WordVectors

Kind = Literal["words", "characters", "pieces"]

# The paper lists the hyphen twice; the second one is never used.
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-,;.!?:'\"/\\|_@#$%^&*~`+-=<>()[]{}\n"
UNKNOWN = 1
MOST_TOKENS = 1 << 20  # of a text
LENGTHS: dict[Kind, int] = {"words": 64, "characters": 1014, "pieces": 128}

_WORD = re.compile(r"\w+|[^\w\s]")
_FIRST = 2  # number of the first word
_CHUNK = 4096  # texts encoded at a time


@dataclass(frozen=True)
class TextOptions:
    """Options of how texts become rows of token numbers.

    Args:
        tokens: ``words``, ``characters``, or ``pieces`` of a tokenizer.
        ngrams: words of the longest n-gram; 1 for words alone.
        length: tokens of a text that are kept, the first ones; by default 64 words, 1,014 characters or 128
            pieces.
        buckets: how many numbers the n-grams share.
        vocabulary: most words that are known: the most frequent ones of the training split.
        vectors: a text file of word vectors to start from, one word a line (GloVe's, or fastText's ``.vec``).
        tokenizer: the ``tokenizer.json`` of a Hugging Face model, for ``pieces``.

    Example:
        >>> from peerbayes.data import TextOptions
        >>> TextOptions(length=16, ngrams=2).vocabulary
        30000
    """

    tokens: Kind = "words"
    ngrams: int = 1
    length: int | None = None
    buckets: int = 20_000
    vocabulary: int = 30_000
    vectors: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if self.tokens not in LENGTHS:
            raise InputError(f"text: unknown tokens '{self.tokens}'{nearest(str(self.tokens), LENGTHS)}")
        for name in ("ngrams", "length", "buckets", "vocabulary"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"text: {name} must be at least 1, got {value}")
        if self.tokens != "words" and (self.ngrams > 1 or self.vectors):
            raise InputError(f"text: ngrams and vectors are for tokens = 'words', not for {self.tokens}")
        if (self.tokens == "pieces") != bool(self.tokenizer):
            raise InputError("text: set tokens = 'pieces' and tokenizer (a tokenizer.json) together, or neither")
        if self.ngrams > (self.length or LENGTHS["words"]):
            raise InputError(f"text: ngrams of {self.ngrams} words do not fit in texts of {self.length}")


@dataclass(frozen=True)
class Vocabulary:
    """Numbers for the tokens of texts; made from a training split by :meth:`build`.

    Args:
        kind: ``words`` or ``characters``.
        length: tokens of a text that are kept, the first ones.
        words: the known words, by falling count and then by spelling; token numbers from 2 on.
        ngrams: words of the longest n-gram.
        buckets: how many numbers the n-grams share; 0 where ngrams is 1.
        dimension: of the word vectors that networks start from; 0 without them.
        tokenizer: for pieces: the content of a ``tokenizer.json``.

    Example:
        >>> from peerbayes.data import TextOptions, Vocabulary
        >>> vocabulary = Vocabulary.build(["the cat sat", "the dog"], TextOptions(length=4))
        >>> vocabulary.words
        ('the', 'cat', 'dog', 'sat')
        >>> vocabulary.encode(["the bird sat"])
        tensor([[2, 1, 5, 0]], dtype=torch.int32)
    """

    kind: Kind
    length: int
    words: tuple[str, ...] = ()
    ngrams: int = 1
    buckets: int = 0
    dimension: int = 0
    tokenizer: str = ""

    @classmethod
    def build(cls, texts: Sequence[str], options: TextOptions) -> Vocabulary:
        """Return the vocabulary of training texts.

        Args:
            texts: the training texts.
            options: how they are cut into tokens.
        """
        length = options.length or LENGTHS[options.tokens]
        if options.tokens == "characters":
            return cls("characters", length)
        if options.tokens == "pieces":
            return cls("pieces", length, tokenizer=_read_tokenizer(options.tokenizer, length))
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(_WORD.findall(text.lower()))
        words = sorted(counts, key=lambda word: (-counts[word], word))[: options.vocabulary]
        buckets = options.buckets if options.ngrams > 1 else 0
        return cls("words", length, tuple(words), options.ngrams, buckets)

    @property
    def size(self) -> int:
        """Number of token numbers: all are below it."""
        if self.kind == "pieces":
            return max(self._pieces.get_vocab().values(), default=0) + 1
        return len(ALPHABET) + 1 if self.kind == "characters" else _FIRST + len(self.words) + self.buckets

    @property
    def width(self) -> int:
        """Token numbers in a row: ``length`` words, then room for their 2-grams, then for their 3-grams..."""
        return sum(self.length - n for n in range(self.ngrams))

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Token numbers of the known words, or of the characters."""
        if self.kind == "characters":
            return {character: index for index, character in reversed(list(enumerate(ALPHABET, start=1)))}
        return {word: number for number, word in enumerate(self.words, start=_FIRST)}

    @functools.cached_property
    def _pieces(self) -> Any:
        return _tokenizer(self.tokenizer, self.length)

    @functools.cached_property
    def padding(self) -> int:
        """The token number that fills rows up: 0, or that of the tokenizer."""
        if self.kind != "pieces":
            return 0
        named = "[PAD]", "<pad>", (json.loads(self.tokenizer).get("padding") or {}).get("pad_token", "")
        for number in map(self._pieces.token_to_id, named):
            if number is not None:
                return int(number)
        raise InputError("data.text.tokenizer: no padding token: expected '[PAD]', '<pad>' or one that its "
                         "padding names (see Tokenizer.enable_padding)")  # fmt: skip

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return token numbers, int32 (N, width), padded with ``padding``.

        An n-gram of words w₁ … wₙ has the number 2 + known words + h(w₁ … wₙ) mod buckets, with fastText's hash
        h(w₁ … wₙ) = h(w₁ … wₙ₋₁) · 116049371 + h(wₙ) modulo 2⁶⁴, and :func:`hashed` for a word. Unknown words have
        n-grams too.
        """
        rows = np.full((len(texts), self.width), self.padding, np.int32)
        for start in range(0, len(texts), _CHUNK):
            part = texts[start : start + _CHUNK]
            span = slice(start, start + len(part))
            if self.kind == "characters":
                numbers = self.numbers
                for row, text in zip(rows[span], part, strict=True):
                    ids = [numbers.get(character, 0) for character in text.lower()[: self.length]]
                    row[: len(ids)] = ids
            elif self.kind == "pieces":
                for row, pieces in zip(rows[span], self._pieces.encode_batch(list(part)), strict=True):
                    row[: len(pieces.ids)] = pieces.ids
            else:
                self._encode_words(rows[span], part)
        return torch.from_numpy(rows)

    def _encode_words(self, rows: NDArray[np.int32], texts: Sequence[str]) -> None:
        hashes = np.zeros((len(texts), self.length), np.uint64)
        counts = np.zeros((len(texts), 1), np.int64)
        numbers = self.numbers
        for row, text in enumerate(texts):
            words = _WORD.findall(text.lower())[: self.length]
            counts[row] = len(words)
            rows[row, : len(words)] = [numbers.get(word, UNKNOWN) for word in words]
            if self.ngrams > 1:
                hashes[row, : len(words)] = [hashed(word) for word in words]
        begin, grams = self.length, hashes
        for n in range(2, self.ngrams + 1):
            grams = grams[:, :-1] * np.uint64(116049371) + hashes[:, n - 1 :]
            whole = np.arange(self.length - n + 1) <= counts - n
            tokens = (grams % np.uint64(self.buckets)).astype(np.int64) + (_FIRST + len(self.words))
            rows[:, begin : begin + grams.shape[1]] = np.where(whole, tokens, 0)
            begin += grams.shape[1]

    @property
    def digest(self) -> str:
        """A hash of everything that numbers depend on."""
        return _digest(asdict(self))

    def to_json(self) -> str:
        """Return the vocabulary with its digest as JSON text."""
        return json.dumps({"digest": self.digest, **asdict(self)}, ensure_ascii=True)

    def save(self, path: str | Path) -> None:
        """Write the vocabulary to a JSON file, atomically."""
        path = Path(path)
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        aside.write_text(self.to_json(), encoding="ascii")
        os.replace(aside, path)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what :meth:`save` wrote; refuse a file that has changed since."""
        try:
            content = json.loads(Path(path).read_bytes())
        except FileNotFoundError:
            raise InputError(f"{path}: no such vocabulary file") from None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read as a vocabulary ({error})") from None
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
            raise InputError(f"{path}: not a vocabulary, or damaged (its digest does not match)")
        try:
            vocabulary = cls(**{**content, "words": tuple(content["words"])})
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}: not a vocabulary of this version ({error})") from None
        vocabulary._check(str(path))
        return vocabulary

    def _check(self, path: str) -> None:
        """Refuse what :meth:`build` can't have made; a digest is easily made for anything."""
        numbers = (self.length, self.ngrams, self.buckets, self.dimension)
        if (
            self.kind not in LENGTHS
            or not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers)
            or not 1 <= self.ngrams <= self.length <= MOST_TOKENS
            or (self.ngrams > 1) > (self.buckets > 0)
            or not all(isinstance(word, str) for word in (*self.words, self.tokenizer))
        ):
            raise InputError(f"{path}: not a vocabulary of this version (a value is of another type, or out of range)")


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=1 << 18)
def hashed(word: str) -> int:
    """Return fastText's hash of a word modulo 2⁶⁴: FNV-1a over the signed bytes of its UTF-8, sign-extended."""
    value = 2166136261
    for byte in word.encode("utf-8", "surrogatepass"):
        value = ((value ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619) & 0xFFFFFFFF
    return value if value < 1 << 31 else value | 0xFFFFFFFF00000000


def _tokenizer(content: str, length: int) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError("text: tokens = 'pieces' needs tokenizers: pip install 'peerbayes[text]'") from None
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    return tokenizer


def _read_tokenizer(path: str, length: int) -> str:
    """Return the content of a ``tokenizer.json`` that can cut texts to a length."""
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8")
        needed = len(_tokenizer(content, length).encode("a " * length).ids)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: the tokenizer can't be read ({error.strerror})") from None
    except Exception as error:  # the library raises plain exceptions
        raise InputError(f"{path}: cannot be read as a tokenizer ({error})") from None
    if needed > length:
        raise InputError(f"{path}: the tokenizer's special tokens do not fit in texts of {length} pieces")
    return content


def read_vectors(path: str | Path, vocabulary: Vocabulary) -> WordVectors:
    """Return the vectors of the vocabulary's words from a text file with lines ``word v1 v2 ...``.

    The first line gives the dimension; a line of two whole numbers before it (word2vec's and fastText's header) is
    skipped. Words may hold blanks, as some of GloVe's do. Where a word comes twice, the first line counts.

    Args:
        path: the file.
        vocabulary: whose words are wanted.

    Raises:
        InputError: the file cannot be read, or has no vector for any word.
    """
    vectors: dict[int, NDArray[np.float32]] = {}
    dimension = 0
    try:
        with Path(path).expanduser().open("rb") as file:
            for number, line in enumerate(file, start=1):
                fields = line.rstrip().split(b" ")
                if number == 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
                    continue
                dimension = dimension or len(fields) - 1
                if dimension < 1 or len(fields) <= dimension or (len(fields) > dimension + 1 and _is_number(fields[1])):
                    raise InputError(f"{path}, line {number}: expected a word and {max(dimension, 1)} numbers, found "
                                     f"{len(fields) - 1}")  # fmt: skip
                word = b" ".join(fields[:-dimension]).decode("utf-8", "replace")
                token = vocabulary.numbers.get(word)
                if token is not None and token not in vectors:
                    vectors[token] = _vector(fields[-dimension:], f"{path}, line {number}")
    except OSError as error:
        raise InputError(f"{path}: the word vectors can't be read ({error.strerror})") from None
    if not vectors:
        raise InputError(f"{path}: has no vector for any of the {len(vocabulary.words)} words of the training split")
    rows = sorted(vectors)
    return WordVectors(torch.tensor(rows), torch.from_numpy(np.stack([vectors[row] for row in rows])))


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _vector(fields: Sequence[bytes], where: str) -> NDArray[np.float32]:
    try:
        values = [float(field) for field in fields]
    except ValueError:
        raise InputError(f"{where}: expected a word and {len(fields)} numbers") from None
    if not all(map(math.isfinite, values)):
        raise InputError(f"{where}: expected finite numbers")
    return np.array(values, np.float32)

"""Texts: official layouts written by the tests, token numbers by hand, vocabularies that survive a file."""

import csv
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from peerbayes.data import (
    ArraySplit,
    TextOptions,
    Vocabulary,
    augment,
    feed,
    load,
    load_images,
    load_texts,
    names,
    to_unit,
)
from peerbayes.data.datasets.corpora import read_corpus
from peerbayes.data.datasets.sources import Texts
from peerbayes.data.vocabulary import ALPHABET, hashed, read_vectors
from peerbayes.errors import InputError
from peerbayes.math.noise import Address

CPU = torch.device("cpu")


def everything(split):
    return split.batch(torch.arange(len(split)), CPU)


def write_csv(path, rows, quoting=csv.QUOTE_MINIMAL):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=quoting).writerows(rows)


def decoded(split, vocabulary):
    """The known words of each row, unknown ones as None, padding left out."""
    by_number = {number: word for word, number in vocabulary.numbers.items()} | {1: None}
    return [[by_number[n] for n in row if n] for row in everything(split)[0][:, : vocabulary.length].tolist()]


# ---- token numbers ------------------------------------------------------------------------------------------------


def test_words_by_hand():
    vocabulary = Vocabulary.build(["The cat, the CAT!", "the end"], TextOptions(length=5))
    # the 3, cat 2, then , ! end by spelling
    assert vocabulary.words == ("the", "cat", "!", ",", "end")
    assert (vocabulary.size, vocabulary.width) == (7, 5)
    rows = vocabulary.encode(["THE end.", "", "the cat , the cat ! end"])
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[2, 6, 1, 0, 0], [0, 0, 0, 0, 0], [2, 3, 5, 2, 3]]


def test_the_vocabulary_keeps_the_most_frequent_words():
    vocabulary = Vocabulary.build(["b b b a a c c d"], TextOptions(vocabulary=3, length=4))
    assert vocabulary.words == ("b", "a", "c")
    assert vocabulary.encode(["d c b a"]).tolist() == [[1, 4, 2, 3]]


@pytest.mark.parametrize(
    ("word", "value"),
    # The published test vectors of 32-bit FNV-1a.
    [("", 0x811C9DC5), ("a", 0xE40C292C), ("b", 0xE70C2DE5), ("foobar", 0xBF9CF968), ("fo", 0x6222E842)],
)
def test_word_hashes_are_fnv(word, value):
    signed = value - (1 << 32) if value >= 1 << 31 else value
    assert hashed(word) == signed % (1 << 64)


def fasttext_hash(word):
    """fastText's C code, in numpy's fixed-size integers: bytes are signed."""
    value = np.uint32(2166136261)
    with np.errstate(over="ignore"):
        for byte in np.frombuffer(word.encode(), np.int8):
            value = (value ^ byte.astype(np.uint32)) * np.uint32(16777619)
    return value.astype(np.int32)


def fasttext_ngrams(words, n, buckets):
    """fastText's addWordNgrams: (order of the gram, first word) -> bucket."""
    found = {}
    hashes = [fasttext_hash(word) for word in words]
    with np.errstate(over="ignore"):
        for i in range(len(words)):
            h = hashes[i].astype(np.int64).astype(np.uint64)
            for j in range(i + 1, min(len(words), i + n)):
                h = h * np.uint64(116049371) + hashes[j].astype(np.int64).astype(np.uint64)
                found[j - i + 1, i] = int(h % np.uint64(buckets))
    return found


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.sampled_from(["a", "foobar", "naïve", "日本", "of", "x9"]), max_size=9),
    n=st.integers(1, 4),
    length=st.integers(4, 7),
    buckets=st.sampled_from([7, 20_000, 2_000_003]),
)
def test_ngrams_are_hashed_as_fasttext_does(words, n, length, buckets):
    vocabulary = Vocabulary.build(["a foobar of"], TextOptions(ngrams=n, length=length, buckets=buckets))
    (row,) = vocabulary.encode([" ".join(words)]).tolist()
    kept = words[:length]
    first = 2 + 3
    expected = [{"a": 2, "foobar": 3, "of": 4}.get(word, 1) for word in kept] + [0] * (length - len(kept))
    grams = fasttext_ngrams(kept, n, buckets)
    for order in range(2, n + 1):
        expected += [first + grams[order, i] if (order, i) in grams else 0 for i in range(length - order + 1)]
    assert row == expected
    assert len(row) == vocabulary.width
    assert max(row, default=0) < vocabulary.size


def test_a_bigram_bucket_is_fixed_for_all_time():
    vocabulary = Vocabulary.build(["a b"], TextOptions(ngrams=2, length=2, buckets=20_000))
    h = ((0xE40C292C - (1 << 32)) * 116049371 + (0xE70C2DE5 - (1 << 32))) % (1 << 64)
    assert vocabulary.encode(["a b"]).tolist() == [[2, 3, 4 + h % 20_000]]
    assert vocabulary.encode(["a b"])[0, 2] == 12_205
    assert vocabulary.size == 20_004


def test_characters_are_those_of_the_paper():
    assert len(ALPHABET) == 70
    assert Counter(ALPHABET).most_common(2) == [("-", 2), ("a", 1)]
    vocabulary = Vocabulary.build(["what is here does not matter"], TextOptions(tokens="characters", length=8))
    rows = vocabulary.encode(["aZ 9-é\n}", "Ab"]).tolist()
    assert rows == [[1, 26, 0, 36, 37, 0, 70, 69], [1, 2, 0, 0, 0, 0, 0, 0]]
    assert vocabulary.size == 71
    assert Vocabulary.build([], TextOptions(tokens="characters")).length == 1014


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=6), data=st.data())
def test_a_vocabulary_survives_a_file_bit_by_bit(texts, data):
    tokens = data.draw(st.sampled_from(["words", "characters"]))
    ngrams = data.draw(st.integers(1, 3)) if tokens == "words" else 1
    vocabulary = Vocabulary.build(texts, TextOptions(tokens=tokens, ngrams=ngrams, length=6, buckets=50))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.json"
        vocabulary.save(path)
        again = Vocabulary.load(path)
        before = path.read_bytes()
        again.save(path)
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == ["vocabulary.json"]
    assert again == vocabulary
    assert again.digest == vocabulary.digest
    assert torch.equal(again.encode(texts), vocabulary.encode(texts))


def test_a_changed_vocabulary_file_is_refused(tmp_path):
    path = tmp_path / "vocabulary.json"
    Vocabulary.build(["one two"], TextOptions(length=4)).save(path)
    whole = path.read_text()
    for text, message in [
        (whole.replace("two", "tow"), "not a vocabulary, or damaged"),
        (whole[:-9], "cannot be read as a vocabulary"),
        ("[1]", "not a vocabulary, or damaged"),
        ("", "cannot be read as a vocabulary"),
    ]:
        path.write_text(text)
        with pytest.raises(InputError, match=f"vocabulary.json: .*{message}"):
            Vocabulary.load(path)
    with pytest.raises(InputError, match="no such vocabulary file"):
        Vocabulary.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "word"}, "unknown tokens 'word'; did you mean 'words'"),
        ({"ngrams": 0}, "ngrams must be at least 1, got 0"),
        ({"length": 0}, "length must be at least 1"),
        ({"tokens": "characters", "ngrams": 2}, "ngrams and vectors are for tokens = 'words'"),
        ({"tokens": "pieces", "tokenizer": "t.json", "ngrams": 2}, "for tokens = 'words', not for pieces"),
        ({"tokens": "pieces"}, "'pieces' and tokenizer \\(a tokenizer.json\\) together"),
        ({"tokenizer": "t.json"}, "'pieces' and tokenizer \\(a tokenizer.json\\) together"),
        ({"ngrams": 3, "length": 2}, "3 words do not fit"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        TextOptions(**options)


# ---- pieces of a Hugging Face tokenizer -----------------------------------------------------------------------------


def write_tokenizer(path, pieces="[CLS] [SEP] [UNK] [PAD] play ##ing ##ed", padding="[PAD]"):
    """Word pieces with marks around a text, as BERT's; padding is not number 0, as RoBERTa's."""
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {piece: number for number, piece in enumerate(pieces.split())}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    made.enable_truncation(2)  # what the file says of lengths does not count
    made.enable_padding(length=9, pad_token=padding)
    made.save(str(path))


def test_pieces_are_the_tokenizers_own_and_survive_without_its_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path)
    options = TextOptions(tokens="pieces", tokenizer=str(path), length=5)
    vocabulary = Vocabulary.build(["not looked at"], options)
    assert (vocabulary.size, vocabulary.width, vocabulary.padding) == (7, 5, 3)
    texts = ["Playing", "played played", "", "chess"]
    expected = [[0, 4, 5, 1, 3], [0, 4, 6, 4, 1], [0, 1, 3, 3, 3], [0, 2, 1, 3, 3]]
    assert vocabulary.encode(texts).tolist() == expected
    vocabulary.save(tmp_path / "vocabulary.json")
    path.unlink()
    assert Vocabulary.load(tmp_path / "vocabulary.json").encode(texts).tolist() == expected


@pytest.mark.parametrize("name", ["<pad>", "<|end|>"])
def test_padding_has_a_name_that_is_known_or_that_the_tokenizer_gives(tmp_path, name):
    write_tokenizer(tmp_path / "t.json", f"[CLS] [SEP] [UNK] play {name}", padding=name)
    vocabulary = Vocabulary.build([], TextOptions(tokens="pieces", tokenizer=str(tmp_path / "t.json"), length=5))
    assert vocabulary.encode(["play"]).tolist() == [[0, 3, 1, 4, 4]]


def test_without_padding_no_piece_takes_its_place(tmp_path):
    write_tokenizer(tmp_path / "t.json", "[CLS] [SEP] [UNK] play")
    vocabulary = Vocabulary.build([], TextOptions(tokens="pieces", tokenizer=str(tmp_path / "t.json"), length=4))
    with pytest.raises(InputError, match=r"^data\.text\.tokenizer: no padding token: expected '\[PAD\]', '<pad>'"):
        vocabulary.encode(["play"])


def test_bad_tokenizers(tmp_path, monkeypatch):
    def built(name, length=5):
        return Vocabulary.build([], TextOptions(tokens="pieces", tokenizer=str(tmp_path / name), length=length))

    (tmp_path / "wrong.json").write_text("{}")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(InputError, match=r"needs tokenizers: pip install 'peerbayes\[text\]'"):
            built("wrong.json")
    with pytest.raises(InputError, match=r"absent\.json: the tokenizer can't be read \(No such file"):
        built("absent.json")
    write_tokenizer(tmp_path / "t.json")
    with pytest.raises(InputError, match=r"wrong\.json: cannot be read as a tokenizer"):
        built("wrong.json")
    with pytest.raises(InputError, match=r"t\.json: the tokenizer's special tokens do not fit in texts of 1 pieces"):
        built("t.json", length=1)


# ---- word vectors -------------------------------------------------------------------------------------------------


def vectors_of(tmp_path, text, words=("the", "cat", "dog")):
    path = tmp_path / "glove.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_vectors(path, Vocabulary("words", 4, words))


def test_vectors_go_to_the_numbers_of_known_words(tmp_path):
    text = "dog 0.5 -1.25 3e-2\n. . . 9 9 9\nzebra 1 1 1\nthe 1 2 3\ndog 7 7 7\n"
    for header in ("", "5 3\n"):
        found = vectors_of(tmp_path, header + text)
        assert found.tokens.tolist() == [2, 4]
        assert torch.equal(found.vectors, torch.tensor([[1, 2, 3], [0.5, -1.25, 0.03]]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\ncat 1\n", "glove.txt, line 2: expected a word and 2 numbers, found 1"),
        ("the 1 2\ncat 1 2 3\n", "glove.txt, line 2: expected a word and 2 numbers, found 3"),
        ("the 1 2\ncat 1 x\n", "glove.txt, line 2: expected a word and 2 numbers"),
        ("the 1 2\ncat 1 nan\n", "glove.txt, line 2: expected finite numbers"),
        ("the\n", "glove.txt, line 1: expected a word and 1 numbers, found 0"),
        ("zebra 1 2\n", "glove.txt: has no vector for any of the 3 words"),
        ("", "glove.txt: has no vector"),
    ],
)
def test_bad_vectors(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        vectors_of(tmp_path, text)


def test_missing_vectors(tmp_path):
    with pytest.raises(InputError, match=r"absent\.txt: the word vectors can't be read \(No such file"):
        read_vectors(tmp_path / "absent.txt", Vocabulary("words", 4, ("a",)))


# ---- layouts ------------------------------------------------------------------------------------------------------


def test_official_agnews(tmp_path):
    folder = tmp_path / "ag_news_csv"
    train = [
        ["3", "Wall St. Bears", 'Short-sellers, "Wall Street"'],
        ["1", "World", "news\\nof the world"],
        ["2", "Sport", "x"],
        ["4", "Tech", "y"],
    ]
    write_csv(folder / "train.csv", train, csv.QUOTE_ALL)
    write_csv(folder / "test.csv", [["2", "Zebra", "world"], ["4", "tech", ""]], csv.QUOTE_ALL)
    (folder / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n")
    found = load("agnews", root=tmp_path)
    assert found.train.labels.tolist() == [2, 0, 1, 3]
    assert found.test.labels.tolist() == [1, 3]
    assert found.class_names == ("World", "Sports", "Business", "Sci/Tech")
    assert (found.classes, found.shape, found.mean, found.std, found.validation) == (4, (64,), (), (), None)
    assert " ".join(decoded(found.train, found.vocabulary)[0]) == 'wall st . bears short - sellers , " wall street "'
    assert decoded(found.train, found.vocabulary)[1] == ["world", "news", "of", "the", "world"]
    # A word that only the test split has is unknown.
    assert "zebra" not in found.vocabulary.words
    assert decoded(found.test, found.vocabulary) == [[None, "world"], ["tech"]]


@pytest.mark.parametrize(
    ("name", "folder", "classes", "last"),
    [
        ("yahoo", "yahoo_answers_csv", 10, "Politics & Government"),
        ("yelp", "yelp_review_full_csv", 5, "5 stars"),
        ("agnews", "ag_news_csv", 4, "Sci/Tech"),
    ],
)
def test_class_names_are_known_without_a_listing(tmp_path, name, folder, classes, last):
    write_csv(tmp_path / folder / "train.csv", [[classes, "a", "b", "c"], ["1", "d", "e", "f"]])
    write_csv(tmp_path / folder / "test.csv", [["2", "a", "", "c"]])
    found = load(name, root=tmp_path)
    assert (found.classes, found.class_names[-1]) == (classes, last)
    assert found.train.labels.tolist() == [classes - 1, 0]
    assert decoded(found.train, found.vocabulary) == [["a", "b", "c"], ["d", "e", "f"]]
    assert name in names()
    with pytest.raises(InputError, match=rf"looked for .*{folder}.*get {folder}\.tar\.gz"):
        load(name, root=tmp_path / "elsewhere")


def test_banking77_in_both_places(tmp_path):
    train = [["text", "category"], ["Where is it?", "card_arrival"], ["How old?", "age_limit"], ["b", "Refund"]]
    test = [["text", "category"], ["x, y", "age_limit"]]
    for there in ("banking77/{}.csv", "banking77_{}.csv"):
        root = tmp_path / there.partition("{")[0].strip("/")
        write_csv(root / there.format("train"), train)
        write_csv(root / there.format("test"), test)
        found = load("banking77", root=root)
        assert found.class_names == ("Refund", "age_limit", "card_arrival")
        assert found.train.labels.tolist() == [2, 1, 0]
        assert found.test.labels.tolist() == [1]
        assert decoded(found.train, found.vocabulary)[0] == ["where", "is", "it", "?"]


CLINC = {
    "oos_val": [["nobody", "oos"]],
    "val": [["hello there", "greeting"]],
    "train": [["say hello", "greeting"], ["translate this", "translate"], ["hi", "greeting"]],
    "oos_test": [["how much is the dow", "oos"], ["hello dow", "oos"]],
    "test": [["translate hello", "translate"]],
    "oos_train": [["other", "oos"]],
}


@pytest.mark.parametrize("place", ["clinc150.json", "clinc150/data_full.json"])
def test_clinc150_and_what_is_out_of_its_scope(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(json.dumps(CLINC))
    found = load("clinc150", root=tmp_path)
    assert found.class_names == ("greeting", "translate")
    assert found.train.labels.tolist() == [0, 1, 0]
    assert (found.validation.labels.tolist(), found.test.labels.tolist()) == ([0], [1])
    # Neither validation, test nor out-of-scope texts are part of the vocabulary.
    assert set(found.vocabulary.words) == {"say", "hello", "translate", "this", "hi"}
    outside = load_texts("clinc150-oos", found.vocabulary, root=tmp_path)
    assert outside.labels is None
    assert decoded(outside, found.vocabulary) == [[None] * 5, ["hello", None]]
    assert decoded(load_texts("clinc150", found.vocabulary, root=tmp_path), found.vocabulary) == [
        ["translate", "hello"]
    ]
    with pytest.raises(InputError, match="its own validation split of 1 texts: leave validation at 0"):
        load("clinc150", root=tmp_path, validation=1)
    with pytest.raises(InputError, match="clinc150-oos has no classes to learn"):
        load("clinc150-oos", root=tmp_path)


def test_json_with_objects_and_class_names(tmp_path):
    content = {
        "classes": ["World", "Sports"],
        "train10k": [{"text": "a b", "label": 1, "noisy_label": 0}, {"text": "c", "label": 0, "noisy_label": 0}],
        "test": [{"text": "b", "label": 1}],
    }
    (tmp_path / "subset.json").write_text(json.dumps(content))
    found = load("subset.json", root=tmp_path)
    assert found.train.labels.tolist() == [1, 0]
    assert (found.name, found.class_names) == ("subset", ("World", "Sports"))
    assert decoded(found.train, found.vocabulary) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("rows", "labels", "class_names"),
    [
        ([["text", "label"], ["a", "0"], ["b", "2"], ["c", "1"], ["d", "0"], ["e", "1"]], [0, 2, 1, 0, 1], None),
        ([["Class Index", "Title", "Text body"], ["1", "a", ""], ["2", "b", ""]], [0, 1], None),
        ([["id", "TEXT", "Label"], ["7", "a", "no"], ["8", "b", "yes"], ["9", "c", "no"]], [0, 1, 0], ("no", "yes")),
    ],
)
def test_headers_name_the_columns(tmp_path, rows, labels, class_names):
    write_csv(tmp_path / "a.csv", rows)
    found = read_corpus(tmp_path / "a.csv", want_train=True)
    assert found.train.labels.tolist() == labels
    assert [text.strip() for text in found.train.texts] == list("abcde")[: len(labels)]
    assert (found.classes, found.class_names) == (max(labels) + 1, class_names)
    assert found.test is None


def test_a_file_of_ones_own_is_split_as_images_are(tmp_path):
    rows = [["text", "label"]] + [[f"only{i} word", "ab"[i % 2]] for i in range(40)]
    write_csv(tmp_path / "mine.csv", rows)
    found = load(tmp_path / "mine.csv", validation=4)
    assert (len(found.train), len(found.validation), len(found.test)) == (28, 4, 8)
    assert found.test.labels.bincount().tolist() == [4, 4]
    # Words of held-out texts are unknown, also where they come from one file.
    assert len(found.vocabulary.words) == 29
    for split in (found.validation, found.test):
        assert decoded(split, found.vocabulary) == [[None, "word"]] * len(split)
    assert all(None not in row for row in decoded(found.train, found.vocabulary))
    assert len(load_texts(tmp_path / "mine.csv", found.vocabulary)) == 40


def test_validation_beside_training_texts_and_texts_without_labels(tmp_path):
    for part, text in (("train", "a"), ("val", "b"), ("test", "c")):
        write_csv(tmp_path / "set" / f"{part}.csv", [["1", text], ["2", text]])
    found = load(tmp_path / "set")
    assert found.validation.labels.tolist() == [0, 1]
    assert decoded(found.validation, found.vocabulary) == [[None], [None]]
    write_csv(tmp_path / "plain.csv", [["text"], ["a a"], ["z"]])
    assert decoded(load_texts(tmp_path / "plain.csv", found.vocabulary), found.vocabulary) == [["a", "a"], [None]]
    with pytest.raises(InputError, match=r"plain\.csv, row 1: expected a class number, or a header"):
        load(tmp_path / "plain.csv")


def test_a_given_vocabulary_is_used_and_vectors_are_not_read_again(tmp_path):
    write_csv(tmp_path / "a.csv", [["1", "cat dog"], ["2", "dog"], ["1", "cat"], ["2", "dog dog"], ["1", "cat cat"]])
    (tmp_path / "glove.txt").write_text("dog 1 2 3\nbird 4 5 6\n")
    options = TextOptions(length=3, vectors="glove.txt")
    first = load("a.csv", root=tmp_path, text=options)
    assert first.vocabulary.dimension == 3
    assert first.vectors.tokens.tolist() == [first.vocabulary.numbers["dog"]]
    first.vocabulary.save(tmp_path / "vocabulary.json")
    (tmp_path / "glove.txt").unlink()
    saved = Vocabulary.load(tmp_path / "vocabulary.json")
    again = load("a.csv", root=tmp_path, text=options, vocabulary=saved)
    assert again.vectors is None
    assert again.vocabulary == first.vocabulary
    assert torch.equal(everything(again.train)[0], everything(first.train)[0])
    reversed_words = Vocabulary("words", 3, saved.words[::-1])
    other = load("a.csv", root=tmp_path, text=options, vocabulary=reversed_words)
    assert torch.equal(everything(other.train)[0], torch.tensor([0, 1, 3, 2])[everything(first.train)[0]].int())
    with pytest.raises(InputError, match=r"glove\.txt: the word vectors can't be read"):
        load("a.csv", root=tmp_path, text=options)


# ---- bad files ----------------------------------------------------------------------------------------------------

GOOD = b"1,a\n2,b\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.csv": b""}, r"train\.csv: the file is empty, expected one row a text"),
        ({"train.csv": b"\n\n"}, r"train\.csv: expected one row a text, found none"),
        ({"train.csv": b"text,label\n"}, r"train\.csv: expected one row a text, found none"),
        ({"train.csv": b"text,topic\na,b\n"}, r"train\.csv, row 1: .*'label', .*or 'intent'; found 'text', 'topic'"),
        ({"train.csv": b"label\na\n"}, r"train\.csv, row 1: expected a column 'text' beside 'label'"),
        ({"train.csv": b"1\n2\n"}, r"train\.csv, row 1: expected a class number and a text, found one column"),
        ({"train.csv": b"1,a,b\n2,c\n"}, r"train\.csv, row 2: expected 3 columns as in row 1, found 2"),
        ({"train.csv": b"text,label\na,x\nb\n"}, r"train\.csv, row 3: expected 2 columns as in row 1, found 1"),
        ({"train.csv": b"1,a\n2,caf\xe9\n"}, r"train\.csv, line 2: expected UTF-8, found the byte 0xe9"),
        ({"train.csv": b"1,a\nx,b\n"}, r"train\.csv, row 2: expected a class number as in row 1, found 'x'"),
        (
            {"train.csv": b"text,label\na,x\nb,y\n"},
            r"test\.csv, row 1: .*the 2 classes \(x, y\), found '2'",
        ),
        ({"train.csv": b"1,a\n3,b\n"}, r"train\.csv: no text has class 2: number the classes without gaps"),
        ({"train.csv": b"0,a\n1,b\n"}, r"train\.csv, row 1: expected a class number from 1 to 1, found '0'"),
        ({"train.csv": b'1,"a\n2,b\n'}, r"train\.csv, row 1: cannot be read as CSV \(unexpected end of data\)"),
        ({"test.csv": b"1,a\n3,b\n"}, r"test\.csv, row 2: expected a class number from 1 to 2, found '3'"),
        ({"test.csv": b"1,a\nx,b\n"}, r"test\.csv, row 2: expected a class number as in row 1, found 'x'"),
        ({"classes.txt": b"only\n"}, r"train\.csv, row 2: expected a class number from 1 to 1, found '2'"),
        ({"classes.txt": b"caf\xe9\n"}, r"classes\.txt, line 1: expected UTF-8, found the byte 0xe9"),
    ],
)
def test_bad_csv(tmp_path, files, message):
    for name, content in ({"train.csv": GOOD, "test.csv": b"2,a\n"} | files).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load(tmp_path)


def test_a_split_is_taken_by_its_exact_name(tmp_path):
    own = {
        "train_notes": ["no texts"],
        "train": [["right", 0], ["word", 1]],
        "train5k": [["wrong", 0]],
        "test": [["x", 0]],
    }
    (tmp_path / "a.json").write_text(json.dumps(own))
    found = load(tmp_path / "a.json")
    assert decoded(found.train, found.vocabulary) == [["right"], ["word"]]


def test_a_folder_with_two_validation_splits_is_refused(tmp_path):
    for part in ("train", "val", "validation"):
        write_csv(tmp_path / "set" / f"{part}.csv", [["1", "a"], ["2", "b"]])
    with pytest.raises(InputError, match=r"set: 'val' and 'validation' could both be one split; leave one of them"):
        load(tmp_path / "set")


def test_a_wrong_byte_far_into_a_file_is_placed_exactly(tmp_path):
    good = b"".join(b"%d,line number %d\n" % (i % 2 + 1, i) for i in range(5000))
    (tmp_path / "a.csv").write_bytes(good + b"1,\xff\n" + good)
    with pytest.raises(InputError, match=r"a\.csv, line 5001: expected UTF-8, found the byte 0xff"):
        load(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty, expected a JSON object"),
        (b'{"train": [', "not valid JSON"),
        (b'{"train": "caf\xe9"}', "line 1: expected UTF-8, found the byte 0xe9"),
        (b"[1]", "expected a JSON object with a list 'train', found list"),
        (b'{"test": []}', "expected a list 'train', found 'test'"),
        (b'{"train": []}', "expected 'train' as a list of texts"),
        (b'{"train": [["a", "x"], ["b"]]}', r"row 2 of 'train': expected \[text, label\]"),
        (b'{"train": [["a", "x"], {"text": "b"}]}', "row 2 of 'train': expected a text, and a label"),
        (b'{"train": [["a", "x"], ["b", true]]}', "row 2 of 'train': expected a text, and a label"),
        (b'{"train": [["a", 0], ["b", 1]], "test": [["c", 2]]}', "row 1 of 'test': .*from 0 to 1, found '2'"),
        (b'{"train": [["a", "x"]], "test": [["c", "y"]]}', r"row 1 of 'test': .*1 classes \(x\), found 'y'"),
        (b'{"train": [["a", 0]], "classes": 3}', "expected 'classes' as a list of names"),
        (b'{"train5k": [["a", 0]], "train_all": [["a", 0]]}', "'train5k' and 'train_all' could both be one split"),
        (
            b'{"train": [["a", 0]], "val": [["a", 0]], "validation": []}',
            "'val' and 'validation' could both be one split",
        ),
    ],
)
def test_bad_json(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.json[:,] {message}"):
        load(tmp_path / "a.json")


def test_texts_and_images_are_not_mixed_up(tmp_path):
    (tmp_path / "clinc150.json").write_text(json.dumps(CLINC))
    vocabulary = Vocabulary.build(["a"], TextOptions())
    for call, message in [
        (lambda: load_images("clinc150", root=tmp_path), "clinc150 holds texts, expected images"),
        (lambda: load_texts("digits", vocabulary), "digits holds images, expected texts"),
        (lambda: load("digits", text=TextOptions()), "digits holds images: leave out the options of text"),
        (lambda: load("clinc150", root=tmp_path, size=8), "clinc150 holds texts: size is for images"),
        (
            lambda: load("clinc150", root=tmp_path, stats="imagenet"),
            "stats = 'imagenet' is for images, but clinc150 holds texts",
        ),
        (lambda: ArraySplit(torch.zeros(3, 2, 2, dtype=torch.int32)), r"token numbers of texts \(N, L\)"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


# ---- on the loop's side -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["device", "stream"])
def test_texts_are_fed_as_images_are(placement):
    rows = torch.arange(30, dtype=torch.int32).view(10, 3)
    split = ArraySplit(rows, torch.arange(10) % 2)
    assert split.shape == (3,)
    batches = feed(split, 4, seed=1, device=CPU, placement=placement)
    batches.prepare(1)
    tokens, labels = batches.batch(1)
    assert tokens.dtype == torch.int32
    index = tokens[:, 0].long() // 3
    assert torch.equal(tokens, rows[index])
    assert torch.equal(labels, index % 2)
    batches.close()
    assert torch.equal(to_unit(tokens), tokens)
    with pytest.raises(InputError, match="augmentation 'flip' is for images: leave augment empty for texts"):
        augment(tokens, ["flip"], Address())


def test_texts_are_selected_with_their_labels():
    chosen = Texts(["a", "b", "c"], torch.tensor([5, 6, 7])).select(torch.tensor([2, 0]))
    assert (list(chosen.texts), chosen.labels.tolist()) == (["c", "a"], [7, 5])


# ---- DTD and Flowers102, which paper 2 uses beside texts ----------------------------------------------------------


def write_image(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (300, 280), (value, 0, 0)).save(path, quality=95)


def reds(split):
    return [round(float(image[0].float().mean())) for image in everything(split)[0]]


@pytest.mark.parametrize("place", ["dtd", "dtd/dtd"])
def test_official_dtd(tmp_path, place):
    folder = tmp_path / place
    for i, name in enumerate(("banded/banded_0002", "banded/banded_0004", "zigzagged/zigzagged_0001", "knitted/k_1")):
        write_image(folder / "images" / f"{name}.jpg", 40 * (i + 1))
    (folder / "labels").mkdir()
    (folder / "labels" / "train1.txt").write_text("zigzagged/zigzagged_0001.jpg\nbanded/banded_0004.jpg\n")
    (folder / "labels" / "val1.txt").write_text("banded/banded_0002.jpg\n")
    (folder / "labels" / "test1.txt").write_text("knitted/k_1.jpg\n")
    found = load("dtd", root=tmp_path)
    assert found.class_names == ("banded", "knitted", "zigzagged")
    assert found.train.labels.tolist() == [2, 0]
    assert (found.validation.labels.tolist(), found.test.labels.tolist()) == ([0], [1])
    np.testing.assert_allclose(reds(found.train), [120, 80], atol=2)
    np.testing.assert_allclose(reds(found.test), [160], atol=2)
    assert found.shape == (3, 224, 224)
    assert found.mean == (0.485, 0.456, 0.406)
    for line, message in [
        ("woven/w.jpg", "'woven' is not one of the class folders"),
        ("banded/x.jpg", "no image"),
    ]:
        (folder / "labels" / "train1.txt").write_text(f"banded/banded_0004.jpg\n{line}\n")
        with pytest.raises(InputError, match=rf"train1\.txt, line 2: {message}"):
            load("dtd", root=tmp_path)
    assert len(load_images("dtd", root=tmp_path)) == 1
    (folder / "labels" / "test1.txt").unlink()
    with pytest.raises(InputError, match=r"test1\.txt: file not found"):
        load_images("dtd", root=tmp_path)


def test_official_flowers102(tmp_path):
    folder = tmp_path / "flowers-102"
    for number in range(1, 6):
        write_image(folder / "jpg" / f"image_{number:05d}.jpg", 40 * number)
    labels = np.array([[77, 1, 102, 5, 1]], np.uint8)
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": labels})
    parts = {"trnid": np.array([[5, 2]], np.uint16), "valid": np.array([[4]], np.uint16)}
    scipy.io.savemat(folder / "setid.mat", parts | {"tstid": np.array([[1, 3]], np.uint16)})
    found = load("flowers102", root=tmp_path)
    assert found.classes == 102
    assert found.train.labels.tolist() == [0, 0]
    assert (found.validation.labels.tolist(), found.test.labels.tolist()) == ([4], [76, 101])
    np.testing.assert_allclose(reds(found.train), [200, 80], atol=2)
    np.testing.assert_allclose(reds(found.test), [40, 120], atol=2)
    scipy.io.savemat(folder / "setid.mat", parts | {"tstid": np.array([[1, 6]], np.uint16)})
    with pytest.raises(InputError, match=r"setid\.mat: tstid must be image numbers from 1 to 5"):
        load("flowers102", root=tmp_path)
    scipy.io.savemat(folder / "setid.mat", parts | {"tstid": np.array([[1, 3]], np.uint16)})
    (folder / "jpg" / "image_00003.jpg").unlink()
    with pytest.raises(InputError, match=r"image_00003\.jpg: file not found"):
        load_images("flowers102", root=tmp_path)


# ---- the real thing -----------------------------------------------------------------------------------------------


def test_real_clinc150(clinc_root):
    found = load("clinc150", root=clinc_root)
    assert (len(found.train), len(found.validation), len(found.test), found.classes) == (15000, 3000, 4500, 150)
    assert set(found.train.labels.bincount().tolist()) == {100}
    assert len(load_texts("clinc150-oos", found.vocabulary, root=clinc_root)) == 1000
    raw = json.loads((clinc_root / "clinc150.json").read_text())
    assert found.class_names == tuple(sorted({label for _, label in raw["train"]}))
    assert [found.class_names[i] for i in found.test.labels.tolist()] == [label for _, label in raw["test"]]

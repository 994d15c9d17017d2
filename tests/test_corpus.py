"""Text in, windows of ids out; what is no text is refused by name."""

import pytest
import torch

from safetrain_core.corpus import Corpus, default_corpus_files, read_text


def test_the_default_corpus_is_real_text_that_every_machine_has():
    assert len(default_corpus_files()) >= 20
    corpus = Corpus.from_files(None, context=64)
    assert len(corpus.train) > 10_000
    inputs, targets = corpus.train[5]
    assert corpus.decode(inputs)[1:] == corpus.decode(targets)[:-1]
    assert corpus.decode(corpus.train[0][0]) in read_text(default_corpus_files()[0])


def test_the_split_is_the_same_every_time_and_its_parts_do_not_overlap():
    text = "".join(chr(97 + i % 26) for i in range(1000))
    first, second = (Corpus(text, context=10) for _ in range(2))
    assert torch.equal(first.train.ids, second.train.ids)
    assert first.decode(first.train.ids) + first.decode(first.val.ids) == text
    assert len(first.val.ids) == 100


def test_each_window_is_in_range_and_windows_cover_the_text_once():
    corpus = Corpus("abcdefghij" * 30, context=7)
    starts = [corpus.train[i][0] for i in range(len(corpus.train))]
    assert corpus.decode(torch.cat(starts)) == ("abcdefghij" * 30)[: 7 * len(starts)]
    with pytest.raises(IndexError):
        corpus.train[len(corpus.train)]


def test_any_characters_round_trip(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes("\ufeffnaïve 漢字 🙂\r\nnext\rline\n".encode() * 50)
    text = read_text(path)
    assert "\r" not in text
    assert not text.startswith("\ufeff")
    corpus = Corpus(text, context=8)
    assert corpus.decode(corpus.encode("漢字 🙂")) == "漢字 🙂"
    with pytest.raises(ValueError, match="'Q' is not in this corpus"):
        corpus.encode("Q")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"abc\0def", "binary (byte 0 at offset 3)"),
        (b"abc\xff\xfedef", "not UTF-8 text (byte 0xff at offset 3)"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, told):
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
        read_text(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        read_text(tmp_path)


@pytest.mark.parametrize("length", [1, 5, 16, 100, 169])
def test_a_text_shorter_than_one_sequence_is_refused_with_what_it_needs(length):
    with pytest.raises(ValueError, match=rf"corpus has {length} characters; with context=16 .* needs about 17\d"):
        Corpus("x" * length, context=16)
    Corpus("x" * 171, context=16)

"""Batches are a function of their arguments alone, and what cannot be read is named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.data import Corpus, synthetic_images


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_tokens(path: Path, tokens: range) -> Path:
    return write(path, np.array(tokens, dtype="<u2").tobytes())


@pytest.fixture
def counting(tmp_path: Path) -> Corpus:
    """A corpus in which each token tells its place."""
    return Corpus.load(write_tokens(tmp_path / "tokens.bin", range(1000)))


def test_the_default_corpus_is_the_standard_library_without_what_was_installed() -> None:
    corpus = Corpus.load()
    assert corpus.name.startswith("Python 3.")
    assert len(corpus.train) > 5_000_000
    assert b"class OrderedDict" in corpus.train.tobytes() + corpus.validation.tobytes()
    assert b"class DistributedDataParallel" not in corpus.train.tobytes()


def test_targets_are_the_tokens_that_follow(counting: Corpus) -> None:
    tokens, targets = counting.batch("train", 4, 16)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)


def test_a_batch_depends_on_seed_step_rank_and_micro_step_alone(counting: Corpus) -> None:
    places = [
        dict(seed=s, step=t, rank=r, micro_step=m) for s in (0, 1) for t in (0, 1) for r in (0, 1) for m in (0, 1)
    ]
    first = [counting.batch("train", 8, 16, **place)[0] for place in places]
    again = [counting.batch("train", 8, 16, **place)[0] for place in reversed(places)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert len({tuple(batch.flatten().tolist()) for batch in first}) == len(places)


def test_the_held_out_part_is_the_last_tenth_and_never_drawn_for_training(counting: Corpus) -> None:
    train = torch.cat([counting.batch("train", 64, 16, step=step)[1] for step in range(20)])
    validation = torch.cat([counting.batch("validation", 64, 16, step=step)[0] for step in range(20)])
    assert (train.max(), validation.min(), validation.max()) == (899, 900, 998)


def test_every_start_is_reached_including_the_last(counting: Corpus) -> None:
    starts = counting.batch("validation", 4000, 95)[0][:, 0]
    assert sorted(set(starts.tolist())) == [900, 901, 902, 903, 904]


def test_a_folder_is_read_in_order_of_name_without_hidden_and_binary_files(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"b" * 10)
    write(tmp_path / "a" / "z.txt", b"z" * 20)
    write(tmp_path / "c.png", b"\0" * 10)
    write(tmp_path / ".git" / "config", b"g" * 10)
    write(tmp_path / "empty.txt", b"")
    corpus = Corpus.load(tmp_path)
    assert corpus.train.tobytes() == b"z" * 18 + b"b" * 9
    assert corpus.validation.tobytes() == b"zzb"
    assert corpus.name == f"{tmp_path} (2 files)"


def test_train_bin_comes_with_val_bin_as_nanogpt_writes_them(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", range(50))
    write_tokens(tmp_path / "val.bin", range(50, 70))
    for path in (tmp_path, tmp_path / "train.bin"):
        corpus = Corpus.load(path)
        assert (len(corpus.train), len(corpus.validation)) == (50, 20)
        assert corpus.vocab_size == 128  # 70, rounded up to a multiple of 64


def test_a_token_outside_the_given_vocabulary_is_named(tmp_path: Path) -> None:
    corpus = Corpus.load(write_tokens(tmp_path / "x.bin", range(5000)), vocab_size=100)
    with pytest.raises(ValueError, match="has token 4\\d+, outside a vocabulary of 100"):
        corpus.batch("validation", 4, 8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("empty.bin", b"", "empty.bin is empty"),
        ("odd.bin", b"123", "odd.bin has 3 bytes, an odd number"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Corpus.load(write(tmp_path / name, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file or folder .*missing\.txt"):
        Corpus.load(tmp_path / "missing.txt")


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.png", b"\0")
    write(tmp_path / "b.png", b"\0")
    with pytest.raises(ValueError, match="has no text in its 2 files"):
        Corpus.load(tmp_path)


def test_an_empty_folder_has_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no text in its 0 files"):
        Corpus.load(tmp_path)


def test_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    corpus = Corpus.load(write(tmp_path / "short.txt", b"x" * 100))
    corpus.check(9)
    with pytest.raises(
        ValueError, match=r"short.txt has 10 tokens for validation; a sequence of 10 needs 11\. Give more"
    ):
        corpus.check(10)
    with pytest.raises(ValueError, match="has at least 1 token, not 0"):
        corpus.batch("train", 1, 0)


def test_wrong_arguments_are_refused(counting: Corpus) -> None:
    with pytest.raises(ValueError, match="not 'test'"):
        counting.batch("test", 1, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be negative"):
        counting.batch("train", 1, 8, seed=-1)


def test_synthetic_images_repeat_and_show_the_pattern_of_their_class() -> None:
    images, labels = synthetic_images("train", 256, seed=1)
    again, _ = synthetic_images("train", 256, seed=1)
    held_out, held_out_labels = synthetic_images("validation", 256, seed=1)
    assert images.shape == (256, 3, 32, 32)
    assert torch.equal(images, again)
    assert not torch.equal(images, held_out)
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(held_out.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == held_out_labels).float().mean() > 0.99  # what training sees tells the held-out classes apart

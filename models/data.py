"""Batches to train on: bytes of real text, tokens of a file, or synthetic images. Nothing is downloaded.

A batch is a pure function of (seed, step, rank, micro-step): no state, no order, no sampler to keep in step. So two
runs that ask for the same batch get it, whatever ran before, and one process can ask for every rank's batches in turn.
"""

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Split = Literal["train", "validation"]
HELD_OUT = 0.1  # of each file, its end
VOCABULARY_MULTIPLE = 64  # a vocabulary read off a token file is rounded up to this, as nanoGPT pads 50257 to 50304

_Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens in two parts that share nothing: one to train on and one held out. Made by `Corpus.load`."""

    name: str  # for people: what was read
    train: _Tokens
    validation: _Tokens
    vocab_size: int

    @classmethod
    def load(cls, path: str | Path | None = None, *, vocab_size: int | None = None) -> "Corpus":
        """Read text as bytes from a file or a folder, or tokens from a `.bin` file; by default, Python's own sources.

        A folder is read with all below it, in order of name, without hidden files and files that hold a zero byte; the
        end of each file is held out. A `.bin` file (or a folder with a `train.bin`) has little-endian uint16 tokens, as
        nanoGPT writes them, and stays on disk; a `val.bin` beside a `train.bin` is the held-out part. The vocabulary is
        then read off the file, which costs one pass over it unless `vocab_size` is given.

        ValueError says what is wrong with the path: missing, unreadable, empty, no text, or an odd number of bytes.
        """
        try:
            if path is None:
                library = Path(sysconfig.get_path("stdlib"))
                return _from_files(f"Python {sysconfig.get_python_version()} standard library", _sources(library))
            path = Path(path)
            if not path.exists():
                raise ValueError(f"there is no file or folder {path}")
            if path.is_dir() and (path / "train.bin").exists():
                path = path / "train.bin"
            if path.is_dir():
                return _from_files(str(path), _walk(path, lambda name: name.startswith(".")))
            if path.suffix == ".bin":
                return _from_tokens(path, vocab_size)
            return _from_files(str(path), [path])
        except OSError as error:
            raise ValueError(f"cannot read {error.filename or path}: {error.strerror}") from error

    def check(self, sequence: int) -> None:
        """Raise ValueError unless both parts hold a sequence of this length and the token that follows it."""
        if sequence < 1:
            raise ValueError(f"a sequence has at least 1 token, not {sequence}")
        for split in get_args(Split):
            size = len(self._split(split))
            if size < sequence + 1:
                raise ValueError(
                    f"{self.name} has {size} tokens for {split}; a sequence of {sequence} needs {sequence + 1}. "
                    "Give more data or a shorter sequence."
                )

    def batch(
        self,
        split: Split,
        batch: int,
        sequence: int,
        seed: int = 0,
        step: int = 0,
        rank: int = 0,
        device: torch.device | str = "cpu",
        micro_step: int = 0,
    ) -> tuple[Tensor, Tensor]:  # tokens and the tokens that follow them, both (batch, sequence) int64
        """Draw a batch of random sequences; the same arguments give the same batch."""
        self.check(sequence)
        tokens = self._split(split)
        random = _generator(split, seed, step, rank, micro_step)
        starts = random.integers(0, len(tokens) - sequence, size=batch)
        drawn = np.stack([tokens[start : start + sequence + 1] for start in starts]).astype(np.int64)
        if drawn.max() >= self.vocab_size:
            raise ValueError(f"{self.name} has token {drawn.max()}, outside a vocabulary of {self.vocab_size}")
        both = torch.from_numpy(drawn)
        return _to(both[:, :-1].contiguous(), device), _to(both[:, 1:].contiguous(), device)

    def _split(self, split: Split) -> _Tokens:
        if split not in get_args(Split):
            raise ValueError(f"a split is 'train' or 'validation', not {split!r}")
        return self.train if split == "train" else self.validation


def synthetic_images(
    split: Split,
    batch: int,
    sequence: int = 0,  # not used: the arguments are those of Corpus.batch, so that either can be called
    seed: int = 0,
    step: int = 0,
    rank: int = 0,
    device: torch.device | str = "cpu",
    micro_step: int = 0,
    classes: int = 10,
) -> tuple[Tensor, Tensor]:  # images (batch, 3, 32, 32) fp32, labels (batch,) int64
    """Draw images that can be learned: each class has a coarse 4 x 4 pattern, and an image is that pattern in noise."""
    patterns = np.random.default_rng(classes).standard_normal((classes, 3, 4, 4), dtype=np.float32)
    random = _generator(split, seed, step, rank, micro_step)
    labels = random.integers(0, classes, size=batch)
    images = patterns[labels].repeat(8, axis=2).repeat(8, axis=3)
    images += random.standard_normal(images.shape, dtype=np.float32)
    return _to(torch.from_numpy(images), device), _to(torch.from_numpy(labels), device)


def _generator(split: Split, seed: int, step: int, rank: int, micro_step: int) -> np.random.Generator:
    if min(seed, step, rank, micro_step) < 0:
        raise ValueError(f"seed, step, rank and micro-step cannot be negative: {seed}, {step}, {rank}, {micro_step}")
    return np.random.default_rng([seed, split == "validation", step, micro_step, rank])


def _to(tensor: Tensor, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cuda":  # pinned, the copy does not hold the host up
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _sources(library: Path) -> list[Path]:
    """Python's own modules: without its tests, and without what was installed beside them."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = [file for file in _walk(library, lambda name: name in skipped) if file.suffix == ".py"]
    if not found:
        raise ValueError(f"this Python has no source files in {library}; name a file or folder of text instead")
    return found


def _walk(folder: Path, skip: Callable[[str], bool]) -> list[Path]:
    """List the files below a folder in one order on every machine, but for files and folders with a name to skip."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(parent, name) for name in files if not skip(name)]
    return sorted(file for file in found if file.is_file())


def _from_files(name: str, files: list[Path]) -> Corpus:
    train: list[bytes] = []
    validation: list[bytes] = []
    for file in files:
        text = file.read_bytes()
        if not text or (0 in text and len(files) > 1):  # empty, or not text; a file named by the user is taken as it is
            continue
        cut = len(text) - int(len(text) * HELD_OUT)
        train.append(text[:cut])
        validation.append(text[cut:])
    if not train:
        raise ValueError(f"{name} is empty" if len(files) == 1 else f"{name} has no text in its {len(files)} files")
    if len(files) > 1:
        name = f"{name} ({len(train)} files)"
    joined = [np.frombuffer(b"".join(parts), dtype=np.uint8) for parts in (train, validation)]
    return Corpus(name, joined[0], joined[1], vocab_size=256)


def _from_tokens(path: Path, vocab_size: int | None) -> Corpus:
    tokens = _map_tokens(path)
    beside = path.with_name("val.bin")
    if path.name == "train.bin" and beside.exists():
        train, validation = tokens, _map_tokens(beside)
    else:
        cut = len(tokens) - int(len(tokens) * HELD_OUT)
        train, validation = tokens[:cut], tokens[cut:]
    if vocab_size is None:
        largest = max(int(part.max()) for part in (train, validation) if len(part))
        vocab_size = -(-(largest + 1) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return Corpus(str(path), train, validation, vocab_size)


def _map_tokens(path: Path) -> npt.NDArray[np.uint16]:
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    if size % 2:
        raise ValueError(f"{path} has {size} bytes, an odd number; a token file holds uint16 tokens, two bytes each")
    return np.memmap(path, dtype="<u2", mode="r")

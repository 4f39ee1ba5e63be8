"""The text that the GPT learns: Python files, cut into windows of characters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # everything else becomes a blank
_MIN_WINDOWS = 100


@dataclass(frozen=True)
class Text:
    """Windows of characters, as indices into `CHARACTERS`.

    Attributes:
        train: int64, [windows, context + 1]; neighbours share one character.
        held_out: the same, from files that are not trained on.
        fingerprint: differs, most likely, between different texts.
    """

    train: Tensor
    held_out: Tensor
    fingerprint: str


def encode(text: str) -> Tensor:
    return torch.tensor([CHARACTERS.index(character) for character in text])


def decode(ids: Tensor) -> str:
    return "".join(CHARACTERS[index] for index in ids.tolist())


def load_text(folder: Path, context: int) -> Text:
    """Reads the Python files of a folder, the same on all ranks; every tenth is held out.

    Collective.

    Raises:
        ValueError: on every rank: too little text, or not the same on all ranks.
    """
    text: Text | None = None
    outcome = ""
    try:
        text = _read(folder, context)
        outcome = f"text {text.fingerprint}"
    except (OSError, ValueError) as error:
        outcome = str(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    if len(set(outcomes)) > 1:
        found = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(outcomes))
        raise ValueError(
            f"expected the same text in {folder} on all ranks, found {found}. Pass --text FOLDER "
            "with the same files, or use the same version of Python everywhere."
        )
    if text is None:
        raise ValueError(outcome)
    return text


def _read(folder: Path, context: int) -> Text:
    if not folder.is_dir():
        raise ValueError(f"expected a folder with Python files, found none at {folder}")
    files = sorted(file for file in folder.glob("*.py") if file.is_file())
    codes = torch.full((256,), CHARACTERS.index(" "))
    for code, character in enumerate(CHARACTERS):
        codes[ord(character)] = code
    parts = {}
    digest = hashlib.sha256()
    for is_held_out in (False, True):
        chosen = [f for i, f in enumerate(files) if (i % 10 == 9) == is_held_out]
        raw = b"\n".join(file.read_bytes() for file in chosen)
        windows = (len(raw) - 1) // context
        if windows < _MIN_WINDOWS:
            raise ValueError(
                f"expected at least {_MIN_WINDOWS} windows of {context} characters both in nine of "
                f"ten and in every tenth of the Python files of {folder}, found "
                f"{max(windows, 0)} in {len(chosen)} of {len(files)} files. Pass --text FOLDER "
                "with more text."
            )
        digest.update(raw)
        ids = codes[torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()]
        parts[is_held_out] = ids[: windows * context + 1].unfold(0, context + 1, context)
    return Text(parts[False], parts[True], digest.hexdigest()[:16])

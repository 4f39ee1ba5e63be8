"""Checkpoints that are whole or not there: written beside the last good one, then put in its place.

Rank 0 reads and writes the file, so hosts need not share a disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KEYS = {"identity", "position", "model", "optimizer", "schedule", "generators"}


def check_writable(path: Path) -> None:
    """Tries, before a training is spent on it, whether rank 0 can write a file there. Collective.

    Raises:
        ValueError: on every rank.
    """
    problem = None
    if dist.get_rank() == 0:
        try:
            if path.is_dir():
                raise IsADirectoryError("it is a folder")
            _part(path).touch()
            _part(path).unlink()
        except OSError as error:
            problem = (
                f"expected a file that can be written as {path}, found that it cannot: {error}. "
                "Give the name of a file in a folder that exists."
            )
    problem = _from_rank_0(problem)
    if problem is not None:
        raise ValueError(problem)


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` on rank 0. An interruption at any point leaves the previous file as it was.

    Collective: no rank goes on before the file is in place, or the failure known to all.

    Raises:
        OSError: the file cannot be written, on rank 0.
        RuntimeError: the same, on the other ranks.
    """
    problem: Exception | None = None
    if dist.get_rank() == 0:
        part = _part(path)
        try:
            with part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())  # on the disk before its name is
            os.replace(part, path)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            problem = error
    text = _from_rank_0(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if text is not None:
        raise RuntimeError(f"rank 0 could not write the checkpoint {path}: {text}")


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote, on every rank. Collective.

    Raises:
        ValueError: on every rank: no file there, not a whole checkpoint, or something else.
    """
    found: Any = None
    if dist.get_rank() == 0:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            found = f"expected a checkpoint at {path}, found no file. Start without --resume."
        except Exception as error:  # torch.load raises many kinds for a damaged file
            found = (
                f"expected a whole checkpoint at {path}, found one that cannot be read "
                f"({type(error).__name__}). It may be truncated; start without --resume, or from "
                "another one."
            )
        else:
            if not isinstance(found, dict) or not found.keys() >= KEYS:
                found = (
                    f"expected a checkpoint of this script at {path}, found something else in it. "
                    "Start without --resume, with another --checkpoint."
                )
    found = _from_rank_0(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _part(path: Path) -> Path:
    return path.parent / (path.name + ".part")


def _from_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]

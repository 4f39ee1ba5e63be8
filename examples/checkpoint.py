"""Checkpoints that are whole or not there: written beside the last good one, then put in its place.

Rank 0 reads and writes the file, so hosts need not share a disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` on rank 0. An interruption at any point leaves the previous file as it was.

    Collective: no rank goes on before the file is in place, or the failure known to all.

    Raises:
        OSError: the file cannot be written, on rank 0.
        RuntimeError: the same, on the other ranks.
    """
    problem: Exception | None = None
    if dist.get_rank() == 0:
        part = path.with_name(path.name + ".part")
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
        ValueError: on every rank: no file there, or not a whole checkpoint.
    """
    found: dict[str, Any] | str | None = None
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
    found = _from_rank_0(found)
    if not isinstance(found, dict):
        raise ValueError(found or f"expected a checkpoint at {path}, found an empty one")
    return found


def _from_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]

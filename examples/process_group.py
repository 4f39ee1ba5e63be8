"""Starts and ends a rank of an example, however it was launched."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def process_group() -> Iterator[str]:
    """A process group over all ranks for as long as the context lasts; yields this rank's device.

    NCCL with a GPU for each rank of this host, else gloo on CPU. Reads the variables that torchrun
    sets: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE.
    """
    if "RANK" not in os.environ:
        raise SystemExit(
            "expected the variables of a rank (RANK, WORLD_SIZE, ...), found none. Start it with "
            f"torchrun --nproc-per-node 2 {sys.argv[0]}, or another way of docs/launching.md."
        )
    torch.set_num_threads(1)  # ranks share the cores
    device = "cpu"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield device
    finally:
        gc.collect()  # a model in a reference cycle would keep the group and its threads alive
        dist.destroy_process_group()

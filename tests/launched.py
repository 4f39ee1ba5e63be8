"""What test_launching.py starts in every way: it trains and writes down the bits that came out.

    <launcher> tests/launched.py FOLDER

Rank and size come from the environment, as in any training script. Each rank writes
``FOLDER/rank<RANK>.json``. It trains with DistributedDataParallel first, so that every way to
launch has its own reference.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp

STEPS, BATCH = 6, 8
# MiB. Small enough for several buckets: one layer of the model below is 0.016 MiB.
BUCKET_CAP_MB = 0.02


def train(wrap: Callable[..., nn.Module], rank: int) -> dict[str, Any]:
    """Losses of this rank and a digest of its parameters after a few steps on its own data."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.Tanh())]
    model = wrap(nn.Sequential(*layers, nn.Linear(64, 10)), bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = torch.randn(BATCH, 64, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return {"losses": losses, "parameters": digest.hexdigest()}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        rank = dist.get_rank()
        outcome = {
            "world_size": dist.get_world_size(),
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "pid": os.getpid(),
            # Tells hosts apart where they share a disk: ranks of one host have one network.
            "network": os.stat("/proc/self/ns/net").st_ino,
            "torch": train(DistributedDataParallel, rank),
            "fusedddp": train(fusedddp.wrap, rank),
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(outcome))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

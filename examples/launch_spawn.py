"""Runs a training script on several ranks of this machine with torch.multiprocessing.spawn.

    python examples/launch_spawn.py --nproc 2 examples/train_digits.py --sync all

It does what torchrun does on one machine, from inside Python: each process gets the environment
variables that `init_process_group` reads, then runs the script. To start a function of your own
program instead of a script, call it where `work` calls `runpy`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path

import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def work(rank: int, nproc: int, port: int, command: list[str]) -> None:
    """One rank: `spawn` passes its number first."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
    )
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)  # as if python had started the script
    runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start")
    parser.add_argument("script", help="training script; what follows are its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    # Ranks share the cores. torchrun sets this too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # One port for all ranks, so it is chosen here. spawn ends the other ranks when one fails.
    command = [args.script, *args.arguments]
    if args.nproc < 1:
        parser.error(f"--nproc: expected at least 1, found {args.nproc}")
    mp.spawn(work, args=(args.nproc, free_port(), command), nprocs=args.nproc)


if __name__ == "__main__":  # spawn imports this file again in every process
    main()

"""Ranks for tests: worker processes that share one gloo group and live for a whole session.

`run(fn, *args)` calls ``fn(rank, *args)`` on every rank and returns the results in rank order. `fn`
is a function of a module under ``tests`` (it travels by name). If it raises on a rank, or the
deadline passes, the test fails with what every rank was doing, and the workers are replaced, since
their collectives may no longer match.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Time that a rank may wait for another one inside of a collective, in seconds.
GROUP_TIMEOUT_S = 20


class RankFailure(AssertionError):
    """What went wrong on the ranks of one call."""


class Ranks:
    """Worker processes in one gloo group; started on first use."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._generation = 0

    def run(self, fn: Callable[..., Any], *args: Any, deadline_s: float = 60) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((fn, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        ends = time.monotonic() + deadline_s
        grace = None
        while len(results) + len(failures) < self.world_size:
            pending = [
                p for r, p in enumerate(self._pipes) if r not in results and r not in failures
            ]
            until = min(ends, grace) if grace else ends
            ready = wait(pending, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else failures)[rank] = value
            if failures and grace is None:  # let other ranks tell their side, but do not wait long
                grace = time.monotonic() + 3
        if len(results) == self.world_size:
            return [results[rank] for rank in range(self.world_size)]
        report = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        report += [
            f"rank {rank} is stuck; its stacks:\n{self._stacks(rank)}"
            for rank in range(self.world_size)
            if rank not in results and rank not in failures
        ]
        self.close()
        raise RankFailure("\n\n".join(report))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._generation += 1
        folder = Path(self._folder.name)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(rank, self.world_size, folder, self._generation, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stacks(self, rank: int) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        path = _stack_file(Path(self._folder.name), self._generation, rank)
        return path.read_text() if path.exists() else "not available"


def _stack_file(folder: Path, generation: int, rank: int) -> Path:
    return folder / f"stacks-{generation}-{rank}.txt"


def _work(rank: int, world_size: int, folder: Path, generation: int, pipe: Connection) -> None:
    stacks = _stack_file(folder, generation, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{generation}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = (True, fn(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)

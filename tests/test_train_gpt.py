"""The GPT example trains as DDP does, resumes exactly, and refuses what it cannot do."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import torch
import torch.distributed as dist
import train_gpt

from tests.graph_cases import captures_on
from tests.ranks import Ranks

ROOT = Path(__file__).parents[1]
SMALL = {"context": 32, "layers": 1, "width": 32, "heads": 2, "batch": 8, "warmup": 5}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


def make_trainer(sync: str = "fused", graph: bool = False, **settings: Any) -> Any:
    wanted = train_gpt.Settings(**{**SMALL, **settings})
    text = train_gpt.load_text(Path(sysconfig.get_path("stdlib")), wanted.context)
    return train_gpt.Trainer(wanted, text, sync, graph=graph)


def train(trainer: Any, path: Path | None = None, every: int = 50) -> list[float]:
    return train_gpt.train(trainer, path, every)


def check_parity(rank: int, dtype: str, steps: int, syncs: tuple[str, ...]) -> None:
    trainers = {s: make_trainer(s, dtype=dtype, steps=steps) for s in ("torch", *syncs)}
    losses = {}
    for sync, trainer in trainers.items():
        torch.manual_seed(rank)  # of dropout
        losses[sync] = train(trainer)
    want = losses.pop("torch")
    assert len(want) == steps and want[-1] < want[0] - 0.5
    for sync, got in losses.items():
        assert got == want, sync
        pairs = zip(
            trainers[sync].module.parameters(), trainers["torch"].module.parameters(), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs), sync


@pytest.mark.parametrize(
    ("dtype", "steps", "syncs"), [("fp32", 200, ("fused",)), ("bf16", 40, ("fused", "manual"))]
)
def test_gpt_is_bitwise_ddp(
    two_ranks: Ranks, dtype: str, steps: int, syncs: tuple[str, ...]
) -> None:
    two_ranks.run(check_parity, dtype, steps, syncs)


def check_resume(rank: int, folder: Path, sync: str) -> None:
    """Another trainer goes on from a checkpoint as the first one did."""
    path = folder / "checkpoint.pt"
    trainer = make_trainer(sync, steps=40)
    first = [trainer.step()[0] for _ in range(17)]
    trainer.save(path)
    want = train(trainer)
    assert len(want) == 23
    other = make_trainer("torch" if sync == "fused" else "fused", steps=40)
    other.resume(path)
    assert other.position == 17
    assert train(other) == want
    assert want[0] not in first


@pytest.mark.parametrize("sync", ["fused", "manual"])
def test_resumes_exactly(two_ranks: Ranks, tmp_path: Path, sync: str) -> None:
    two_ranks.run(check_resume, tmp_path, sync)


def check_graph(rank: int, folder: Path, dtype: str) -> None:
    """`--graph` changes no loss: run eagerly as on any CPU, captured, and resumed from either."""
    eager, uncaptured, captured, resumed = (
        make_trainer(graph=graph, steps=5, accumulate=2, dtype=dtype)
        for graph in (False, True, True, True)
    )
    torch.manual_seed(rank)
    want = [eager.step()[0] for _ in range(3)]
    eager.save(folder / "eager.pt")
    want += train(eager)
    torch.manual_seed(rank)
    assert train(uncaptured) == want
    with captures_on("cpu"):
        torch.manual_seed(rank)
        got = [captured.step()[0] for _ in range(3)]
        captured.save(folder / "captured.pt")
        assert got + train(captured) == want
        assert captured.graphed._graphed.num_graphs == 2  # the first micro-step, and the last
        assert captured.graphed._graphed._backend.num_replays == 9  # all but the very first
        for file in ("eager.pt", "captured.pt"):
            resumed.resume(folder / file)  # the second time with graphs there
            assert train(resumed) == want[3:]
        captured.graphed._graphed.close()
        resumed.graphed._graphed.close()
    other = make_trainer(steps=5, accumulate=2, dtype=dtype)
    other.resume(folder / "captured.pt")
    assert train(other) == want[3:]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_graph_changes_no_loss(two_ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    two_ranks.run(check_graph, tmp_path, dtype)


def losses_of(rank: int, settings: dict[str, Any]) -> list[float]:
    return train(make_trainer(**settings))


def test_two_ranks_follow_one_process(two_ranks: Ranks, one_rank: Ranks) -> None:
    """Two ranks with half of the batch each make the steps of one process with all of it.

    The gradients differ by the rounding of a mean, about 1e-7 of their size. AdamW divides by their
    magnitude, so that a relative error stays one, and 40 steps of at most 1e-3 each move the loss
    by far less than 1e-4; 1e-5 was seen.
    """
    settings = {"steps": 40, "dropout": 0.0, "accumulate": 1, "lr": 1e-3}
    halves = two_ranks.run(losses_of, settings)
    (whole,) = one_rank.run(losses_of, settings)
    means = [(a + b) / 2 for a, b in zip(*halves, strict=True)]
    assert len(means) == 40 and means[-1] < means[0] - 0.5
    assert max(abs(a - b) for a, b in zip(means, whole, strict=True)) < 1e-4


def check_shares(rank: int) -> list[list[int]]:
    """The first characters of every window that this rank sees in an epoch."""
    trainer = make_trainer(batch=8, accumulate=2)
    trainer.text = dataclasses.replace(
        trainer.text, train=torch.arange(40)[:, None].expand(40, 33).clone()
    )
    return [
        [int(i) for inputs, _ in trainer.micro_batches(step) for i in inputs[:, 0]]
        for step in range(5)
    ]


def test_ranks_share_the_data_without_overlap(two_ranks: Ranks) -> None:
    shares = two_ranks.run(check_shares)
    assert [len(step) for step in shares[0]] == [4] * 5
    epoch = itertools.chain.from_iterable(shares[0] + shares[1])
    assert sorted(epoch) == list(range(40))  # each window once


def check_damaged(rank: int, folder: Path) -> None:
    path = folder / "checkpoint.pt"
    trainer = make_trainer(steps=6)
    with pytest.raises(ValueError, match="found no file"):
        trainer.resume(path)
    for wrong in (folder, folder / "nowhere" / "checkpoint.pt"):
        with pytest.raises(ValueError, match="found that it cannot"):
            checkpoint.check_writable(wrong)
    checkpoint.check_writable(path)
    assert not list(folder.iterdir())
    dist.barrier()
    if rank == 0:
        torch.save([torch.zeros(3)], path)
    dist.barrier()
    with pytest.raises(ValueError, match="found something else in it"):
        trainer.resume(path)
    dist.barrier()
    trainer.step()
    trainer.save(path)
    with pytest.raises(ValueError, match="with width 32 where this one has 64"):
        make_trainer(steps=6, width=64).resume(path)
    with pytest.raises(ValueError, match="with steps 6 where this one has 7"):
        make_trainer(steps=7).resume(path)
    dist.barrier()
    if rank == 0:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    dist.barrier()
    with pytest.raises(ValueError, match="cannot be read"):
        trainer.resume(path)
    dist.barrier()
    train(trainer, path, every=3)  # the process can go on, and save again
    other = make_trainer(steps=6)
    other.resume(path)
    assert other.position == 6


def test_damaged_or_foreign_checkpoints_are_refused_on_all_ranks(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(check_damaged, tmp_path)


def check_interrupted(rank: int, folder: Path) -> None:
    path = folder / "checkpoint.pt"
    trainer = make_trainer(steps=6)
    trainer.step()
    trainer.save(path)

    def fail(descriptor: int) -> None:
        os.ftruncate(descriptor, 100)
        raise OSError("disk full")

    original, checkpoint.os.fsync = os.fsync, fail
    trainer.step()
    dist.barrier()
    try:
        with pytest.raises((OSError, RuntimeError), match="disk full"):
            trainer.save(path)
    finally:
        checkpoint.os.fsync = original
    other = make_trainer(steps=6)
    other.resume(path)
    assert other.position == 1
    assert not list(folder.glob("*.part"))


def test_interrupted_save_keeps_the_last_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(check_interrupted, tmp_path)


def check_refused(rank: int, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"multiple of ranks \(2\) times accumulate \(2\)"):
        make_trainer(batch=6)
    with pytest.raises(ValueError, match=r"found 0 in 0 of 0 files.*--text FOLDER"):
        train_gpt.load_text(folder / str(0), 32)
    with pytest.raises(ValueError, match="expected a folder with Python files, found none"):
        train_gpt.load_text(folder / "nowhere", 32)
    with pytest.raises(ValueError, match="expected the same text"):
        train_gpt.load_text(folder / str(rank), 32)


def test_bad_input_is_refused_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    for index in range(10):
        (tmp_path / "1" / f"{index}.py").write_text("x = 1\n" * 1000)
    two_ranks.run(check_refused, tmp_path)


def launch(*arguments: str) -> subprocess.Popen[str]:
    """An example under torchrun, on two ranks, in a process group of its own."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        shown, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, shown
    return shown


def resumed_losses(rank: int, path: Path, settings: dict[str, Any]) -> list[float]:
    trainer = make_trainer(**settings)
    trainer.resume(path)
    return train(trainer)


@pytest.mark.slow
def test_killed_and_resumed(two_ranks: Ranks, tmp_path: Path) -> None:
    """Killed whenever it happens to be, the training resumes with the losses it would have had."""
    path, steps = tmp_path / "checkpoint.pt", 300
    settings = {**SMALL, "steps": steps}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    # Without torchrun, whose ranks outlive it for a while.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "examples/train_gpt.py", *flags]
    ranks = [
        subprocess.Popen(
            [*command, "--checkpoint", str(path), "--every", "7"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, **address, "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))  # any moment will do, in the middle of a save as well
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    want = two_ranks.run(losses_of, {"steps": steps})
    for mine, rest in zip(want, two_ranks.run(resumed_losses, path, {"steps": steps}), strict=True):
        assert 0 < len(rest) < steps and (steps - len(rest)) % 7 == 0
        assert rest == mine[-len(rest) :]


@pytest.mark.slow
def test_train_gpt_under_torchrun() -> None:
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    flags += ["--steps=5", "--dtype=bf16"]
    shown = finish(launch("examples/train_gpt.py", *flags))
    assert "held-out loss 4." in shown and "after 5 steps" in shown and "\ndef " in shown
    graphed = finish(launch("examples/train_gpt.py", *flags, "--graph"))
    assert graphed.count("The step runs eagerly, without a graph") == 1
    assert graphed[graphed.index("held-out") :] == shown[shown.index("held-out") :]


@pytest.mark.slow
def test_compare_and_plot(tmp_path: Path) -> None:
    file = tmp_path / "demo.png"
    shown = finish(launch("examples/compare_gpt.py", "--steps", "10", "--plot", str(file)))
    assert "fused and torch step for step equal: 10 of 10 losses" in shown
    assert "manual and torch step for step equal: 10 of 10 losses" in shown
    assert file.read_bytes().startswith(b"\x89PNG")

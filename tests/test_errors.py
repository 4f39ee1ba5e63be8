"""Bad input: an error in words, on every rank, within seconds, and the process stays usable."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedddp
from fusedddp.checks import _device_index
from tests.expected import assert_gradients, mean_of_ranks
from tests.models import Branches, batch, mlp
from tests.ranks import Ranks


def still_works(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(batch(0, rank, (8, 20))).sum().backward()
    others = [torch.empty_like(wrapped.module[4].bias.grad) for _ in range(2)]
    dist.all_gather(others, wrapped.module[4].bias.grad)
    assert torch.equal(*others)


def refused(wrap: Any, *args: Any, **keywords: Any) -> tuple[str, str]:
    began = time.monotonic()
    try:
        wrap(*args, **keywords)
    except Exception as error:
        assert time.monotonic() - began < 5, "took too long"
        return type(error).__name__, str(error)
    raise AssertionError("not refused")


def check_keyword(rank: int, keywords: dict[str, Any], only_rank: int | None) -> tuple[str, str]:
    if only_rank is not None and rank != only_rank:
        keywords = {}
    result = refused(fusedddp.wrap, mlp(), **keywords)
    still_works(rank)
    return result


BAD_KEYWORDS = [
    (
        {"bucket_cap_mb": 0},
        "ValueError",
        "bucket_cap_mb: expected a positive number of MiB, found 0",
    ),
    ({"bucket_cap_mb": float("nan")}, "ValueError", "bucket_cap_mb: expected a positive number"),
    ({"bucket_cap_mb": "25"}, "TypeError", "bucket_cap_mb: expected a number of MiB or None"),
    ({"bucket_cap_mb": True}, "TypeError", "bucket_cap_mb: expected a number of MiB or None"),
    ({"find_unused_parameters": 1}, "TypeError", "find_unused_parameters: expected True or False"),
    ({"static_graph": "yes"}, "TypeError", "static_graph: expected True or False, found 'yes'"),
    (
        {"device_ids": [0, 1]},
        "ValueError",
        "device_ids can only be None or contain a single element",
    ),
    ({"device_ids": [0]}, "ValueError", "Leave both out"),
    ({"output_device": 1}, "ValueError", "Leave both out"),
    ({"mixed_precision": "bf16"}, "TypeError", "mixed_precision: expected None or a torch.nn"),
    ({"bucket_cap_mb_list": [1, -2]}, "ValueError", "bucket_cap_mb_list: expected a positive"),
    ({"bucket_cap_mb_list": 3}, "TypeError", "bucket_cap_mb_list: expected a list of numbers"),
    ({"skip_all_reduce_unused_params": 1}, "TypeError", "skip_all_reduce_unused_params: expected"),
    ({"param_to_hook_all_reduce": 1}, "ValueError", "expected both or none"),
]


@pytest.mark.parametrize(
    ("keywords", "kind", "text"), BAD_KEYWORDS, ids=[f"{k}" for k, _, _ in BAD_KEYWORDS]
)
def test_keyword_values(two_ranks: Ranks, keywords: dict[str, Any], kind: str, text: str) -> None:
    for found_kind, found_text in two_ranks.run(check_keyword, keywords, None):
        assert found_kind == kind
        assert text in found_text


def test_a_value_that_is_wrong_on_one_rank_is_told_to_all(two_ranks: Ranks) -> None:
    on_0, on_1 = two_ranks.run(check_keyword, {"bucket_cap_mb": -1}, 1)
    assert on_1 == (
        "ValueError",
        "bucket_cap_mb: expected a positive number of MiB, found -1. Leave it out for the default, "
        "or use a large number for a single bucket.",
    )
    assert on_0[0] == "RuntimeError"
    assert on_0[1].startswith(
        "rank 1 failed, so no rank can go on. It says: ValueError: bucket_cap_mb"
    )


def check_different_keywords(rank: int) -> None:
    kind, text = refused(fusedddp.wrap, mlp(), bucket_cap_mb=[1, 2][rank])
    assert kind == "RuntimeError"
    assert text.startswith("expected the same keywords of wrap on all ranks")
    assert "rank 0 has [bucket_cap_bytes=1048576], rank 1 has [bucket_cap_bytes=2097152]" in text
    kind, text = refused(fusedddp.wrap, mlp(), forward_sync_buffers=rank == 0)
    assert "rank 0 has [sync_buffers=True], rank 1 has [sync_buffers=False]" in text
    still_works(rank)


def test_keywords_that_differ_between_ranks(two_ranks: Ranks) -> None:
    two_ranks.run(check_different_keywords)


def check_modules(rank: int) -> None:
    frozen = mlp().requires_grad_(False)
    text = "DistributedDataParallel is not needed when a module doesn't have any parameter"
    for module in (frozen, nn.ReLU()):
        kind, found = refused(fusedddp.wrap, module)
        assert kind == "RuntimeError" and text in found
        assert type(module).__name__ in found
    # On one rank only: the other is told.
    kind, found = refused(fusedddp.wrap, frozen if rank == 0 else mlp())
    assert kind == "RuntimeError" and text in found and ("rank 0 failed" in found) == (rank == 1)
    kind, found = refused(fusedddp.wrap, nn.LazyLinear(3))
    assert kind == "RuntimeError" and "uninitialized parameters" in found and "weight" in found
    kind, found = refused(fusedddp.wrap, nn.Linear(2, 2, device="meta"))
    assert kind == "ValueError" and "meta device" in found and "to_empty" in found
    kind, found = refused(fusedddp.wrap, [mlp()])
    assert kind == "TypeError" and "expected a torch.nn.Module, found list" in found
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap'"):
        fusedddp.wrap(mlp(), bucket_cap=25)
    still_works(rank)


def test_modules_that_cannot_be_wrapped(two_ranks: Ranks) -> None:
    two_ranks.run(check_modules)


def different_model(rank: int, what: str) -> nn.Module:
    if what == "shape":
        return nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4 + rank, 1))
    if what == "dtype":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        return model.double() if rank else model
    if what == "name":
        model = nn.Module()
        model.register_module("left" if rank == 0 else "right", nn.Linear(4, 4))
        return model
    if what == "stride":
        conv = nn.Conv2d(3, 4, 2)
        return conv.to(memory_format=torch.channels_last) if rank else conv
    if what == "frozen":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[1].requires_grad_(rank == 0)
        return model
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank)))


def check_different(rank: int, what: str) -> tuple[str, str]:
    result = refused(fusedddp.wrap, different_model(rank, what))
    still_works(rank)
    return result


@pytest.mark.parametrize(
    ("what", "on_0", "on_1"),
    [
        ("shape", "0.weight: shape (4, 4), torch.float32", "0.weight: shape (5, 4), torch.float32"),
        ("dtype", "0.weight: shape (4, 4), torch.float32", "0.weight: shape (4, 4), torch.float64"),
        ("name", "left.weight: shape (4, 4)", "right.weight: shape (4, 4)"),
        ("stride", "weight: shape (4, 3, 2, 2), t", "weight: shape (4, 3, 2, 2), strides (12, 1, "),
        ("frozen", "1.weight: shape (1, 4), torch.float32]", "1.weight: shape (1, 4), torch."),
        ("number", "nothing]", "2.weight: shape (4, 4), torch.float32]"),
    ],
)  # fmt: skip
def test_ranks_that_disagree(two_ranks: Ranks, what: str, on_0: str, on_1: str) -> None:
    for kind, text in two_ranks.run(check_different, what):
        assert kind == "RuntimeError"
        assert text.startswith("expected the same parameters on all ranks")
        assert f"rank 0 has [{on_0}" in text
        assert f"rank 1 has [{on_1}" in text


def check_different_buffers(rank: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(2 + rank))
    kind, text = refused(fusedddp.wrap, model)
    assert kind == "RuntimeError" and text.startswith("expected the same buffers on all ranks")
    assert "rank 0 has [table: torch.float32[2]], rank 1 has [table: torch.float32[3]]" in text
    still_works(rank)


def test_buffers_that_differ(two_ranks: Ranks) -> None:
    two_ranks.run(check_different_buffers)


def test_device_index() -> None:
    assert _device_index(3) == 3
    assert _device_index("cuda:2") == 2
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError):  # torch's own: there is no accelerator
            _device_index("cuda")


def check_groups(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    kind, text = refused(fusedddp.wrap, mlp(), process_group=dist.group.WORLD, device_mesh=mesh)
    assert kind == "RuntimeError"
    assert "Cannot specify both process_group and device_mesh arguments." in text
    plane = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    kind, text = refused(fusedddp.wrap, mlp(), device_mesh=plane)
    assert kind == "RuntimeError" and "Only 1D device mesh is supported, but got" in text
    kind, text = refused(fusedddp.wrap, mlp(), process_group="gloo")
    assert kind == "TypeError" and "found str" in text
    kind, text = refused(fusedddp.wrap, mlp(), device_mesh=[0, 1])
    assert kind == "TypeError" and "found list" in text
    only_0 = dist.new_group([0])
    if rank == 1:
        kind, text = refused(fusedddp.wrap, mlp(), process_group=only_0)
        assert kind == "ValueError" and "this rank (1) is a member of" in text
    still_works(rank)


def test_groups_and_meshes(two_ranks: Ranks) -> None:
    two_ranks.run(check_groups)


def check_accepted(rank: int) -> None:
    """Keywords that change nothing say so, and change nothing."""
    model = mlp()
    delayed = [(n, p) for n, p in model.named_parameters() if n.startswith("0.")]
    with pytest.warns(UserWarning, match="delay_all_reduce_named_params has no effect on when"):
        wrapped = fusedddp.wrap(
            model,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=model[4].weight,
        )
    assert all(a is b for a, (_, b) in zip(wrapped._delay_all_reduce_params, delayed, strict=True))
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
        assert_gradients(wrapped, want)
    branches = Branches(2)
    with pytest.warns(UserWarning, match="skip_all_reduce_unused_params has no effect on what"):
        wrapped = fusedddp.wrap(
            branches, skip_all_reduce_unused_params=True, find_unused_parameters=True
        )
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.full((3,), float(rank)), [0]).backward()
        assert torch.equal(branches.w[0].grad, torch.full((3,), 0.5))
        assert branches.w[1].grad is None
    for name, value in (
        ("a pair", {"delay_all_reduce_named_params": [3]}),
        ("of the module", {"delay_all_reduce_named_params": [("x", nn.Parameter(torch.ones(1)))]}),
    ):
        kind, text = refused(
            fusedddp.wrap, mlp(), **value, param_to_hook_all_reduce=nn.Parameter(torch.ones(1))
        )
        assert kind in ("TypeError", "ValueError"), name
        assert "delay_all_reduce_named_params: expected" in text
    kind, text = refused(fusedddp.wrap, mlp(), device_ids=3)
    assert kind == "TypeError" and "device_ids: expected None or a list of one device" in text


def test_keywords_that_are_accepted(two_ranks: Ranks) -> None:
    two_ranks.run(check_accepted)


def test_without_a_process_group() -> None:
    code = (
        "import torch, fusedddp\n"
        "for call in (fusedddp.wrap, fusedddp.all_reduce_gradients):\n"
        "    try: call(torch.nn.Linear(2, 2))\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("Default process group has not been initialized.")
        assert "torch.distributed.init_process_group(" in line

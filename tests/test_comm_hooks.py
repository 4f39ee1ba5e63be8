"""Communication hooks, those of torch unchanged, against torch DDP with the same hook."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from fusedddp.comm_hooks import GradBucket
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import batch, gradients, mlp
from tests.ranks import Ranks


def train(model: nn.Module, rank: int, steps: int = 5) -> list[dict[str, Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, rank, (8, 20))).square().mean().backward()
        history.append(gradients(model))
        optimizer.step()
    return history


def register(model: Any, name: str) -> None:
    if name == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "allreduce of a group":
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    elif name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "fp16 wrapper":
        hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        model.register_comm_hook(None, hook)
    elif name == "post-local SGD":
        alone = [dist.new_group([other]) for other in range(2)][dist.get_rank()]
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    elif name == "noop":
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    elif name == "built-in allreduce":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif name == "built-in fp16":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def check_parity(rank: int, name: str, views: bool) -> None:
    histories = []
    for wrapper in (fusedddp.wrap, DistributedDataParallel):
        model = wrapper(mlp(), gradient_as_bucket_view=views)
        register(model, name)
        histories.append(train(model, rank))
    for step, (ours, theirs) in enumerate(zip(*histories, strict=True)):
        for key, gradient in ours.items():
            assert torch.equal(gradient, theirs[key]), (step, key)
    last = [torch.empty_like(histories[0][-1]["0.weight"]) for _ in range(2)]
    dist.all_gather(last, histories[0][-1]["0.weight"])
    assert torch.equal(*last) == (name not in ("noop", "post-local SGD"))


@both_views
@pytest.mark.parametrize(
    "name",
    [
        "allreduce",
        "allreduce of a group",
        "fp16",
        "fp16 wrapper",
        "post-local SGD",
        "noop",
        "built-in allreduce",
        "built-in fp16",
    ],
)
def test_the_gradients_are_those_of_ddp(two_ranks: Ranks, name: str, views: bool) -> None:
    two_ranks.run(check_parity, name, views)


def check_bf16(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(copy.deepcopy(model))
    wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
        halves = []
        for other in range(2):
            model.zero_grad()
            model(batch(step, other, (8, 20))).sum().backward()
            halves.append([p.grad.to(torch.bfloat16) / 2 for p in model.parameters()])
        for p, a, b in zip(wrapped.parameters(), *halves, strict=True):
            assert torch.equal(p.grad, (a + b).float())


def test_bf16_compression_runs_on_gloo_too(two_ranks: Ranks) -> None:
    two_ranks.run(check_bf16)


def check_power_sgd(rank: int, rank_of_matrices: int) -> None:
    """After the start every rank has the same gradients, near the mean, with error feedback."""
    model = mlp()
    plain = fusedddp.wrap(copy.deepcopy(model))
    wrapped = fusedddp.wrap(copy.deepcopy(model))
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=rank_of_matrices,
        start_powerSGD_iter=2,
        min_compression_rate=0.1,
        use_error_feedback=True,
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(5):
        plain.zero_grad()
        wrapped.zero_grad()
        x = batch(step, rank, (8, 20))
        plain(x).square().mean().backward()
        wrapped(x).square().mean().backward()
        for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True):
            everywhere = [torch.empty_like(q.grad) for _ in range(2)]
            dist.all_gather(everywhere, q.grad.contiguous())
            assert torch.equal(*everywhere)
            if step < 2 or rank_of_matrices >= 64:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    assert state.iter == 5  # counted by is_last()
    assert state.error_dict, "compressed at least once"


@pytest.mark.parametrize("rank_of_matrices", [1, 64])
def test_power_sgd(two_ranks: Ranks, rank_of_matrices: int) -> None:
    two_ranks.run(check_power_sgd, rank_of_matrices)


def check_one_matrix(rank: int) -> None:
    """A hook that draws random numbers for each bucket needs the same buckets to compare."""
    histories = []
    for wrapper in (fusedddp.wrap, DistributedDataParallel):
        torch.manual_seed(1)
        model = wrapper(nn.Linear(16, 12, bias=False))
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        history = []
        for step in range(6):
            model.zero_grad()
            model(batch(step, rank, (8, 16))).square().mean().backward()
            history.append(model.module.weight.grad.clone())
        histories.append(history)
    for step, (ours, theirs) in enumerate(zip(*histories, strict=True)):
        assert torch.equal(ours, theirs), step


def test_power_sgd_compresses_a_matrix_as_under_ddp(two_ranks: Ranks) -> None:
    two_ranks.run(check_one_matrix)


def resizing_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Grows the buffer for a while, as hooks do that compress it as a square matrix."""
    buffer = bucket.buffer()
    length = buffer.numel()
    buffer.resize_(length + 1000)
    buffer[length:] = 1
    work = dist.all_reduce(buffer, async_op=True)

    def shrink(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return future.value()[0].div_(2).resize_(length)

    return work.get_future().then(shrink)


def check_resizing(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model)
    wrapped.register_comm_hook(None, resizing_hook)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
        assert_gradients(wrapped, want)


def test_a_hook_may_resize_its_buffer(two_ranks: Ranks) -> None:
    two_ranks.run(check_resizing)


def check_bucket(rank: int, bucket_cap_mb: float) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, 5))
            self.b = nn.Parameter(torch.ones(7, dtype=torch.float64))
            self.c = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
            self.d = nn.Parameter(torch.ones(11))
            self.h = nn.Parameter(torch.ones(5, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            total = self.a.sum() + 2 * self.b.sum() + (3 - 4j) * self.c.sum() + 5 * self.d.sum()
            return total.abs() * x + self.h.sum() * x.half()

    model = Mixed()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=bucket_cap_mb)
    seen: list[list[tuple[Any, ...]]] = []

    def hook(state: list[str], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            seen.append([])
        assert isinstance(bucket, GradBucket)
        buffer = bucket.buffer()
        state.append("called")
        seen[-1].append((bucket.index(), bucket.is_last()))
        params, views = bucket.parameters(), bucket.gradients()
        reals = sum(p.numel() * (2 if p.is_complex() else 1) for p in params)
        assert buffer.dim() == 1 and buffer.numel() == reals
        assert buffer.untyped_storage().nbytes() == buffer.numel() * buffer.element_size()
        for p, view in zip(params, views, strict=True):
            assert view.shape == p.shape and view.dtype == p.dtype
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert torch.equal(
            buffer,
            torch.cat([torch.view_as_real(v).flatten() if v.is_complex() else v.flatten()
                       for v in views]),
        )  # fmt: skip
        bucket.set_buffer(buffer.clone())  # what later calls of buffer() see, not the result
        doubled = buffer * 2  # neither divided nor summed: the result is what counts
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(doubled)
        return future

    calls: list[str] = []
    wrapped.register_comm_hook(calls, hook)
    alone = copy.deepcopy(model)
    for _ in range(3):
        wrapped.zero_grad()
        alone.zero_grad()
        wrapped(torch.tensor(1.0 + rank)).sum().backward()
        alone(torch.tensor(1.0 + rank)).sum().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad * 2)
    assert len(seen) == 3 and len(calls) == sum(map(len, seen))
    for round_ in seen:
        assert [index for index, _ in round_] == list(range(len(round_)))
        assert [is_last for _, is_last in round_] == [False] * (len(round_) - 1) + [True]


@pytest.mark.parametrize("bucket_cap_mb", [25, 1 / 2**18])
def test_a_hook_gets_packed_raw_gradients(two_ranks: Ranks, bucket_cap_mb: float) -> None:
    two_ranks.run(check_bucket, bucket_cap_mb)


def check_with_options(rank: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))

        def forward(self, x: Tensor, which: list[int]) -> Tensor:
            return sum((self.w[i] * x).sum() for i in which)

    model = Two()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for step, which in enumerate([([0], [0, 1]), ([0, 1], [1]), ([1], [1])]):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(step + 20, rank, (3,)), which[rank]).backward()
        wrapped(batch(step, rank, (3,)), which[rank]).backward()
        want = mean_of_ranks(
            model,
            lambda m, r, s=step, w=which: (
                m(batch(s + 20, r, (3,)), w[r]) + m(batch(s, r, (3,)), w[r])
            ),
        )
        assert_gradients(wrapped, want)
    strict = fusedddp.wrap(Two())
    strict.register_comm_hook(None, default_hooks.allreduce_hook)
    strict(batch(0, rank, (3,)), [0, 1, 2] if rank else [0, 1]).backward()
    with pytest.raises(RuntimeError, match=r"w\.2"):
        strict(batch(0, rank, (3,)), [0, 1, 2])


def test_a_hook_with_unused_parameters_and_accumulation(two_ranks: Ranks) -> None:
    two_ranks.run(check_with_options)


def bad_result(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.ones(1))
    return future


def raises(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    raise ArithmeticError("in the hook")


def check_failing_hooks(rank: int) -> None:
    for hook, kind, text in (
        (lambda state, bucket: bucket.buffer(), RuntimeError, "must return a torch.futures.Future"),
        (bad_result, RuntimeError, "elements of bucket.buffer"),
        (raises, ArithmeticError, "in the hook"),
    ):
        model = mlp()
        wrapped = fusedddp.wrap(model)
        wrapped.register_comm_hook(None, hook)
        for step in range(2):
            with pytest.raises(kind, match=text):
                wrapped(batch(step, rank, (4, 20))).sum().backward()
            assert all(p.grad is None for p in model.parameters()), "half-reduced gradients"
        del wrapped  # and its hooks
        again = fusedddp.wrap(model)
        again(batch(7, rank, (4, 20))).sum().backward()
        assert_gradients(again, mean_of_ranks(model, lambda m, r: m(batch(7, r, (4, 20))).sum()))


def test_a_hook_that_fails_leaves_nothing_half_done(two_ranks: Ranks) -> None:
    two_ranks.run(check_failing_hooks)


def check_registration(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())

    def annotated(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def returning(state: object, bucket: Any) -> int: ...

    annotated.__annotations__["bucket"] = int
    returning.__annotations__["return"] = int
    for hook, kind, text in (
        (1, TypeError, "Communication hook must be callable"),
        (lambda bucket: None, TypeError, r"must take \(state, bucket\)"),
        (annotated, ValueError, "bucket annotation should be dist.GradBucket"),
        (returning, ValueError, "return annotation should be torch.futures.Future"),
    ):
        with pytest.raises(kind, match=text):
            wrapped.register_comm_hook(None, hook)
    with pytest.raises(TypeError, match="BuiltinCommHookType"):
        wrapped._register_builtin_comm_hook("allreduce")
    wrapped(batch(0, rank, (4, 20))).sum().backward()
    wrapped.register_comm_hook(None, debugging_hooks.noop_hook)  # later is possible, too
    assert wrapped._comm_hooks == [(debugging_hooks.noop_hook, None)]
    with pytest.raises(RuntimeError, match=r"can only be called once\. Found noop_hook"):
        wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
    alone = copy.deepcopy(wrapped.module)
    wrapped.zero_grad()
    wrapped(batch(1, rank, (4, 20))).sum().backward()
    alone.zero_grad()
    alone(batch(1, rank, (4, 20))).sum().backward()
    assert_gradients(wrapped, gradients(alone), exact=True)
    one_sided = fusedddp.wrap(mlp())
    if rank == 1:
        one_sided.register_comm_hook(None, debugging_hooks.noop_hook)
    with pytest.raises(RuntimeError, match="expected the same comm hook on all ranks"):
        one_sided(batch(1, rank, (4, 20))).sum().backward()


def test_registration(two_ranks: Ranks) -> None:
    two_ranks.run(check_registration)


def check_one_rank_fails(rank: int, where: str) -> None:
    """A hook that fails on one rank after its collective: all ranks raise, and can go on."""
    model = mlp()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 256)
    fails = [False]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        bad = fails[0] and rank == 1 and bucket.index() == 0
        if bad and where == "none":
            work.wait()
            return None
        if bad and where == "raise":
            work.wait()
            raise ArithmeticError("on this rank")

        def divide(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            if bad and where == "then":
                raise ArithmeticError("on this rank")
            return future.value()[0].div_(2)[: 3 if bad and where == "size" else None]

        return work.get_future().then(divide)

    wrapped.register_comm_hook(None, hook)
    for step in range(5):
        wrapped.zero_grad()
        fails[0] = step in (0, 2)
        loss = wrapped(batch(step, rank, (8, 20))).sum()
        if fails[0]:
            with pytest.raises((RuntimeError, ArithmeticError)) as raised:
                loss.backward()
            if rank == 0:
                assert "the comm hook failed on 1 other ranks" in str(raised.value)
            assert all(p.grad is None for p in model.parameters())
        else:
            loss.backward()
            want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
            assert_gradients(wrapped, want)


@pytest.mark.parametrize("where", ["then", "size", "none", "raise"])
def test_a_hook_that_fails_on_one_rank_is_told_to_all(two_ranks: Ranks, where: str) -> None:
    two_ranks.run(check_one_rank_fails, where)


def check_wrapped_power_sgd(rank: int) -> None:
    """A hook in a hook: what `gradients` views follows the buffer that was set."""
    model = mlp()
    wrapped = fusedddp.wrap(model)
    state = powerSGD_hook.PowerSGDState(
        None, 4, start_powerSGD_iter=2, min_compression_rate=0.1, use_error_feedback=True
    )
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    wrapped.register_comm_hook(state, hook)
    for step in range(5):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).square().mean().backward()
        for name, p in model.named_parameters():
            everywhere = [torch.empty_like(p.grad) for _ in range(2)]
            dist.all_gather(everywhere, p.grad.contiguous())
            assert torch.equal(*everywhere), name
            assert p.grad.any(), name


def test_fp16_around_power_sgd(two_ranks: Ranks) -> None:
    two_ranks.run(check_wrapped_power_sgd)


def check_copy(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
    with wrapped.no_sync():
        twin = copy.deepcopy(wrapped)
    assert twin._comm_hooks == [] and twin.require_backward_grad_sync
    for step in range(2):
        twin.zero_grad()
        twin(batch(step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(twin.module, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
        assert_gradients(twin, want)


def test_a_copy_has_no_hook(two_ranks: Ranks) -> None:
    two_ranks.run(check_copy)

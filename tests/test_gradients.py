"""Unusual parameters, and what may be done with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedddp
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import batch, mlp
from tests.ranks import Ranks


class Odd(nn.Module):
    """Zero-element, zero-dimensional, 64-bit, 16-bit, complex and non-contiguous parameters."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.f64 = nn.Parameter(torch.randn(5, dtype=torch.float64, generator=g))
        self.bf16 = nn.Parameter(torch.randn(7, generator=g).bfloat16())
        self.f16 = nn.Parameter(torch.randn(3, generator=g).half())
        self.c64 = nn.Parameter(torch.randn(3, 2, dtype=torch.cfloat, generator=g))
        self.turned = nn.Parameter(torch.randn(4, 6, generator=g).t())
        self.image = nn.Parameter(
            torch.randn(2, 3, 2, 2, generator=g).to(memory_format=torch.channels_last)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.empty.sum(), self.scalar * x, (self.f64 * x).sum(), (self.bf16 * x).sum()]
        parts += [(self.f16 * x).sum(), (self.turned * x).square().sum()]
        parts += [(self.c64 * (1 + 2j) * x).abs().sum(), (self.image * x).square().sum()]
        return torch.stack([p.double() for p in parts]).sum()


def check_odd_parameters(rank: int, views: bool) -> None:
    model = Odd()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor(float(rank + 1 + step))).backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(torch.tensor(float(r + 1 + s))))
        assert_gradients(wrapped, want)
        for name, p in model.named_parameters():
            assert p.grad.dtype == p.dtype and p.grad.stride() == p.stride(), name
    assert model.c64.grad.imag.abs().min() > 0


@both_views
def test_odd_parameters(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_odd_parameters, views)


def check_half_range(rank: int) -> None:
    values = torch.tensor([60000.0, -65504.0, 2.0**-24, 3 * 2.0**-24, 1.0, 0.0]).half()
    model = nn.Linear(6, 1, bias=False, dtype=torch.float16)
    wrapped = fusedddp.wrap(model)
    for _ in range(3):
        wrapped.zero_grad()
        (model.weight.grad is None) or pytest.fail("zero_grad left a gradient")
        wrapped(values[None]).sum().backward()
        assert torch.equal(model.weight.grad[0], values)


def test_equal_fp16_gradients_come_back_unchanged(two_ranks: Ranks) -> None:
    two_ranks.run(check_half_range)


def check_memory_format(rank: int, views: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3))
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    model.to(memory_format=torch.channels_last)  # after wrapping, as fine-tuning scripts do
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (2, 3, 5, 5))).square().mean().backward()
        want = mean_of_ranks(
            model, lambda m, r, s=step: m(batch(s, r, (2, 3, 5, 5))).square().mean()
        )
        assert_gradients(wrapped, want)
        if step == 1:  # back again, once the buckets are laid out
            model.to(memory_format=torch.contiguous_format)


@both_views
def test_gradients_of_another_memory_format(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_memory_format, views)


def check_changed_module(rank: int, views: bool) -> None:
    """A module moved to another dtype after wrapping is laid out again; half of it is refused."""
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views, bucket_cap_mb=1 / 256)

    def loss(m: nn.Module, r: int, seed: int) -> Tensor:
        dtype = next(m.parameters()).dtype
        return m(batch(seed, r, (8, 20)).to(dtype)).square().mean()

    def good_step(seed: int) -> None:
        wrapped.zero_grad()
        loss(wrapped, rank, seed).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: loss(m, r, seed)))
        assert all(p.grad.dtype == p.dtype for p in model.parameters())

    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        for seed in range(3):
            good_step(seed)
    first = model[0].weight  # its gradient comes last, when others are reduced already
    first.data, first.grad = first.data[:, :10].clone(), None
    with pytest.raises(
        RuntimeError, match=r"expected the gradient of 0\.weight to be of .*float32"
    ):
        wrapped(batch(7, rank, (8, 10))).sum().backward()


@both_views
def test_a_module_that_changes_after_wrapping(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_changed_module, views)


class Hidden(nn.Module):
    """Returns an object that nobody looks into, made by reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        holder = type("Holder", (), {})()
        holder.loss = x.square().mean()
        return holder


def check_nested_rounds(rank: int, views: bool) -> None:
    model = Hidden()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (5, 4)).requires_grad_()).loss.backward()
        want = mean_of_ranks(
            model, lambda m, r, s=step: m(batch(s, r, (5, 4)).requires_grad_()).loss
        )
        assert_gradients(wrapped, want)


@both_views
def test_nested_backwards_that_end_early_are_reduced_and_no_error(
    two_ranks: Ranks, views: bool
) -> None:
    two_ranks.run(check_nested_rounds, views)


def check_user_hooks(rank: int) -> None:
    """Hooks of the user see the local gradient and may change it, whenever they were registered."""
    model = mlp()
    seen: list[Tensor] = []

    def triple(p: Tensor) -> None:
        seen.append(p.grad.clone())
        p.grad.mul_(3)

    model[4].weight.register_post_accumulate_grad_hook(triple)
    wrapped = fusedddp.wrap(model)
    model[0].weight.register_post_accumulate_grad_hook(triple)
    model[2].weight.register_hook(lambda g: g * 5)

    def loss(m: nn.Module, r: int, step: int) -> Tensor:
        return m(batch(step, r, (8, 20))).square().mean()

    for step in range(4):
        if step == 2:  # also once the buckets are laid out
            model[2].bias.register_post_accumulate_grad_hook(triple)
        wrapped.zero_grad()
        seen.clear()
        loss(wrapped, rank, step).backward()
        want = mean_of_ranks(mlp(), lambda m, r, s=step: loss(m, r, s))
        want["0.weight"] *= 3
        want["4.weight"] *= 3
        want["2.weight"] *= 5
        if step >= 2:
            want["2.bias"] *= 3
        assert_gradients(wrapped, want)
        alone = mlp()
        loss(alone, rank, step).backward()
        assert torch.equal(seen[0], alone[4].weight.grad), "the hook saw a reduced gradient"
    # What was overtaken once is last from then on, so that its gradient need not wait for the end.
    for index, p in enumerate(model.parameters()):
        assert wrapped.reducer._hooks.is_last(index, p)


def test_hooks_of_the_user_come_first(two_ranks: Ranks) -> None:
    two_ranks.run(check_user_hooks)


def check_direct(rank: int, views: bool) -> None:
    """Gradients of at least the cap are reduced in place, unless somebody shares their memory."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(64, 8))
            self.b = nn.Parameter(torch.randn(64, 8))
            self.rest = nn.Linear(8, 64)
            self.shares = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.rest(x)
            if self.shares:  # both get the same gradient memory
                return (hidden @ (self.a + self.b)).square().mean()
            return (hidden @ self.a).square().mean() + (hidden @ self.b).abs().mean()

    model = Net()
    # 2 KiB: a, b and rest.weight are each as large as the cap.
    wrapped = fusedddp.wrap(model, bucket_cap_mb=2 / 1024, gradient_as_bucket_view=views)
    for step in range(6):
        model.shares = step in (2, 4)
        wrapped.zero_grad()
        wrapped(batch(step, rank, (5, 8))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (5, 8)))))
    direct = [b.layout.params for b in wrapped.reducer.buckets if b.layout.is_direct]
    assert len(direct) >= 2, wrapped.reducer.layout


@both_views
def test_large_gradients_are_reduced_in_place(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_direct, views)


def check_views(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model)
    addresses: list[list[int]] = []
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(6):
        wrapped.zero_grad(set_to_none=step % 2 == 0)
        wrapped(batch(step, rank, (8, 20))).square().mean().backward()
        if step:
            addresses.append([p.grad.data_ptr() for p in model.parameters()])
        for p in model.parameters():
            p.grad.detach_()  # refused for views, so gradients are none
    assert all(a == addresses[0] for a in addresses), "addresses move although nobody held them"
    (flat,) = (bucket._memory().flat for bucket in wrapped.reducer.buckets)
    storage = flat.untyped_storage().data_ptr()
    assert all(p.grad.untyped_storage().data_ptr() == storage for p in model.parameters())
    # A gradient that the user keeps is not overwritten by the next step.
    held = model[0].weight.grad
    kept.append((held, held.clone()))
    wrapped.zero_grad()
    wrapped(batch(7, rank, (8, 20))).square().mean().backward()
    assert torch.equal(*kept[0])
    assert model[0].weight.grad.data_ptr() != held.data_ptr()


def test_gradients_alias_the_bucket_and_leave_kept_ones_alone(two_ranks: Ranks) -> None:
    two_ranks.run(check_views)


def check_swapped_gradients(rank: int) -> None:
    """`.grad` of one parameter put on another: it lies in the other one's slot."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for cap in (None, 1 / 2**18):  # one bucket, and one for each parameter
        wrapped = fusedddp.wrap(model, bucket_cap_mb=cap)
        for step in range(4):
            wrapped.zero_grad()
            wrapped(batch(step, rank, (5, 4))).square().sum().backward()
            a, b, c = model.parameters()
            a.grad, b.grad, c.grad = c.grad, a.grad, b.grad
            before = [p.grad.clone() for p in model.parameters()]
            wrapped(batch(step + 9, rank, (5, 4))).square().sum().backward()
            want = mean_of_ranks(
                model, lambda m, r, s=step: m(batch(s + 9, r, (5, 4))).square().sum()
            )
            for p, old, new in zip(model.parameters(), before, want.values(), strict=True):
                torch.testing.assert_close(p.grad, old + new)


def test_gradients_swapped_between_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(check_swapped_gradients)


def check_own_gradients(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=False)
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    mine = {id(p): p.grad for p in model.parameters()}
    wrapped.zero_grad(set_to_none=False)
    wrapped(batch(1, rank, (8, 20))).sum().backward()
    assert all(p.grad is mine[id(p)] for p in model.parameters()), "written in place, as under DDP"
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(mine), "gradients share memory"


def test_without_views_gradients_are_tensors_of_their_own(two_ranks: Ranks) -> None:
    two_ranks.run(check_own_gradients)


class _SameMemory(torch.autograd.Function):
    """Returns its gradient in the same memory each time, as a graphed section does."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.memory = x, memory
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        ctx.memory.copy_(gradient * ctx.x)
        return None, None, ctx.memory.detach()


class _Held:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Section(nn.Module):
    """Returns its output where a wrapper finds it, or in an object where it does not."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.memory = torch.zeros(3)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor | _Held:
        out: Tensor = _SameMemory.apply(self.memory, x, self.weight)
        return _Held(out) if self.hidden else out


def check_section(rank: int, views: bool, hidden: bool) -> None:
    section = Section(hidden=hidden)
    model = fusedddp.wrap(section, gradient_as_bucket_view=views)

    def backward(x: Tensor) -> None:
        out = model(x)
        (out.value if hidden else out).backward()

    for step in range(4):  # recording and later rounds
        x = torch.arange(3.0) + 10 * rank + step
        for factor in (1, 2):
            with model.no_sync():
                backward(factor * x)
        assert section.weight.grad.tolist() == (3 * x).tolist()
        mean = torch.arange(3.0) + 5 + step
        backward(4 * x)
        assert section.weight.grad.tolist() == (7 * mean).tolist()
        model.zero_grad()
        for count in (1, 2, 3):  # each adds to what the one before it has reduced
            backward(x)
            assert section.weight.grad.tolist() == (count * mean).tolist()
        model.zero_grad()


@both_views
@pytest.mark.parametrize("hidden", [False, True], ids=["", "hidden"])
def test_gradients_in_memory_that_the_next_backward_writes(
    two_ranks: Ranks, views: bool, hidden: bool
) -> None:
    two_ranks.run(check_section, views, hidden)


def check_gradients_of_the_user(rank: int) -> None:
    model = nn.Linear(3, 2)
    wrapped = fusedddp.wrap(model)
    flat = torch.zeros(8)
    model.weight.grad, model.bias.grad = flat[:6].view(2, 3), flat[6:]
    with wrapped.no_sync():
        for _ in range(2):
            wrapped(torch.full((1, 3), float(rank + 1))).sum().backward()
    assert flat.tolist() == [2 * (rank + 1)] * 6 + [2, 2]


def test_gradients_where_the_user_put_them_are_added_to(two_ranks: Ranks) -> None:
    two_ranks.run(check_gradients_of_the_user)


def check_ignored(rank: int) -> None:
    model = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    with torch.no_grad():
        model[2].weight.fill_(rank)  # neither compared nor broadcast
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
    assert torch.equal(model[2].weight, torch.full_like(model[2].weight, rank))
    other = [torch.empty_like(model[2].weight) for _ in range(2)]
    dist.all_gather(other, model[2].weight.grad.contiguous())
    assert not torch.equal(*other), "the ignored parameter was reduced"
    dist.all_gather(other, model[2].weight.detach())
    dist.all_gather(
        reduced := [torch.empty_like(model[4].bias) for _ in range(2)], model[4].bias.grad
    )
    assert torch.equal(*reduced)


def test_ignored_parameters_are_left_alone(two_ranks: Ranks) -> None:
    two_ranks.run(check_ignored)


class PassesLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x), self.factor


def check_leaf_outputs(rank: int) -> None:
    model = PassesLeaf()
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        out, factor = wrapped(batch(step, rank, (5, 4)))
        (out * factor).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: (m.lin(batch(s, r, (5, 4)))).sum())
        torch.testing.assert_close(model.lin.weight.grad, want["lin.weight"])
    assert not model.factor._backward_hooks, "hooks pile up on a leaf"


def test_a_parameter_among_the_outputs(two_ranks: Ranks) -> None:
    two_ranks.run(check_leaf_outputs)


def check_replaced(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    state = {name: value.clone() for name, value in wrapped.state_dict().items()}
    wrapped.load_state_dict(state, assign=True)
    with pytest.raises(
        RuntimeError, match=r"found another one as 0\.weight.*Wrap the module again"
    ):
        wrapped(batch(0, rank, (8, 20))).sum().backward()


def test_replaced_parameters_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(check_replaced)


def check_tied_between_wrappers(rank: int, views: bool) -> None:
    """One parameter in two wrapped modules is averaged by both, the second time without effect."""
    torch.manual_seed(0)
    first, second = mlp(), mlp()
    second[0].weight = first[0].weight
    modules = nn.ModuleList([first, second])
    a = fusedddp.wrap(first, gradient_as_bucket_view=views)
    b = fusedddp.wrap(second, gradient_as_bucket_view=views)
    for step in range(5):
        modules.zero_grad()

        def loss(pair: Any, r: int, step: int = step) -> Tensor:
            x = batch(step, r, (3, 20))
            return pair[0](x).square().mean() + pair[1](x).square().mean()

        want = mean_of_ranks(modules, loss)
        loss([a, b], rank).backward()
        assert_gradients(modules, want)


@both_views
def test_a_parameter_of_two_wrapped_modules(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_tied_between_wrappers, views)


def check_converted_and_unused(rank: int, views: bool) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "spare": nn.Linear(4, 2)})
    model.forward = lambda x, both: (  # type: ignore[method-assign,assignment]
        model["used"](x) + model["spare"](x) if both else model["used"](x)
    )
    wrapped = fusedddp.wrap(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (3, 4)), True).sum().backward()
    model["spare"].double()
    wrapped.zero_grad()
    want = mean_of_ranks(model, lambda m, r: m["used"](batch(9, r, (3, 4))).square().sum())
    wrapped(batch(9, rank, (3, 4)), False).square().sum().backward()
    assert want["spare.weight"] is None
    assert_gradients(model, want)


@both_views
def test_a_part_that_is_converted_and_then_unused(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_converted_and_unused, views)


def check_lost_hooks(rank: int, part: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapped = fusedddp.wrap(model, find_unused_parameters=True)
    wrapped(batch(0, rank, (3, 4))).sum().backward()
    for param in model[1].parameters() if part else model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
    wrapped.zero_grad()
    with pytest.raises(RuntimeError, match=r"hook of fusedddp on [01]\.weight.*is gone"):
        wrapped(batch(1, rank, (3, 4))).sum().backward()


@pytest.mark.parametrize("part", [True, False], ids=["part", "all"])
def test_swapped_parameters_that_lost_their_hooks_are_told(two_ranks: Ranks, part: bool) -> None:
    two_ranks.run(check_lost_hooks, part)

"""Parameters that are frozen, unfrozen or replaced after wrapping."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import fusedddp
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import Branches, batch, gradients, mlp
from tests.ranks import Ranks


def step_and_check(wrapped: nn.Module, rank: int, step: int, exact: bool = False) -> None:
    """One backward; the gradients are the mean over ranks, and None for what is frozen."""
    wrapped.zero_grad()
    wrapped(batch(step, rank, (8, 20))).sum().backward()
    want = mean_of_ranks(wrapped.module, lambda m, r: m(batch(step, r, (8, 20))).sum())
    assert_gradients(wrapped, want, exact)


def check_unfreezing(rank: int, views: bool, find_unused: bool, accumulate: bool) -> None:
    model = mlp()
    for p in model[:3].parameters():
        p.requires_grad_(False)
    wrapped = fusedddp.wrap(
        model, gradient_as_bucket_view=views, find_unused_parameters=find_unused
    )
    for step in range(2):
        step_and_check(wrapped, rank, step)
    assert model[0].weight.grad is None
    model[2].requires_grad_(True)  # gradual unfreezing, as in fine-tuning
    if accumulate:
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(10, rank, (8, 20))).sum().backward()
        wrapped(batch(11, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(
            model,
            lambda m, r: m(batch(10, r, (8, 20))).sum() + m(batch(11, r, (8, 20))).sum(),
        )
        assert_gradients(wrapped, want)
    for step in range(3):
        step_and_check(wrapped, rank, 20 + step)
    model[0].requires_grad_(True)
    for step in range(3):
        step_and_check(wrapped, rank, 30 + step)
    assert all(p.grad is not None for p in model.parameters())


@both_views
@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "no_sync"])
def test_unfrozen_parameters_are_reduced(
    two_ranks: Ranks, views: bool, find_unused: bool, accumulate: bool
) -> None:
    two_ranks.run(check_unfreezing, views, find_unused, accumulate)


def check_freezing(rank: int, views: bool, find_unused: bool, keep: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(
        model, gradient_as_bucket_view=views, find_unused_parameters=find_unused
    )
    for step in range(2):
        step_and_check(wrapped, rank, step)
    before = gradients(wrapped)
    model[0].requires_grad_(False)
    if not keep:
        wrapped.zero_grad()
    for step in range(3):
        for p in model[2:].parameters():
            p.grad = None
        wrapped(batch(9 + step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(9 + s, r, (8, 20))).sum())
        for name in ("0.weight", "0.bias"):
            assert want[name] is None
            want[name] = before[name] if keep else None  # not zeros: weight decay would move them
        assert_gradients(wrapped, want)
        if step == 1:
            in_buckets = {i for b in wrapped.reducer.layout.buckets for i in b.params}
            assert {wrapped.reducer.names[i] for i in in_buckets} == {
                "2.weight", "2.bias", "4.weight", "4.bias"
            }, "frozen parameters still travel"  # fmt: skip
    model[0].requires_grad_(True)
    for step in range(2):
        step_and_check(wrapped, rank, 20 + step)


@both_views
@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
@pytest.mark.parametrize("keep", [False, True], ids=["none", "kept"])
def test_frozen_parameters_keep_their_gradient(
    two_ranks: Ranks, views: bool, find_unused: bool, keep: bool
) -> None:
    two_ranks.run(check_freezing, views, find_unused, keep)


def check_discriminator(rank: int, find_unused: bool) -> None:
    """The whole wrapped module is frozen in every other backward, as in a GAN."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(5, 20), mlp()
    wrapped_g = fusedddp.wrap(generator, find_unused_parameters=find_unused)
    wrapped_d = fusedddp.wrap(discriminator, find_unused_parameters=find_unused)
    for step in range(3):
        wrapped_g.zero_grad()
        wrapped_d.zero_grad()
        discriminator.requires_grad_(False)
        wrapped_d(wrapped_g(batch(step, rank, (4, 5)))).sum().backward()
        want = mean_of_ranks(
            generator, lambda m, r, s=step: discriminator(m(batch(s, r, (4, 5)))).sum()
        )
        assert_gradients(wrapped_g, want)
        assert all(p.grad is None for p in discriminator.parameters())
        discriminator.requires_grad_(True)
        step_and_check(wrapped_d, rank, step)


@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
def test_a_discriminator_is_frozen_in_turns(two_ranks: Ranks, find_unused: bool) -> None:
    two_ranks.run(check_discriminator, find_unused)


def check_without_forward(rank: int) -> None:
    """Unfrozen, and then trained by another method: the gradient must not stay local in silence."""
    model = mlp()
    model[0].requires_grad_(False)
    wrapped = fusedddp.wrap(model)
    step_and_check(wrapped, rank, 0)
    model[0].requires_grad_(True)
    wrapped.zero_grad()
    with pytest.raises(RuntimeError, match=r"expected 0\.(weight|bias) to stay frozen until"):
        model(batch(1, rank, (8, 20))).sum().backward()
    for step in range(2):
        step_and_check(wrapped, rank, 2 + step)


def test_unfreezing_is_told_where_no_forward_tells(two_ranks: Ranks) -> None:
    two_ranks.run(check_without_forward)


def check_one_sided(rank: int) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    wrapped = fusedddp.wrap(model)
    step_and_check(wrapped, rank, 0)
    model[2 * rank].requires_grad_(True)
    with pytest.raises(RuntimeError, match="expected the same parameters that require a gradient"):
        wrapped(batch(1, rank, (8, 20)))
    for p in (*model[0].parameters(), *model[2].parameters()):
        p.requires_grad_(True)
    for step in range(2):
        step_and_check(wrapped, rank, 2 + step)


def test_ranks_that_unfreeze_differently_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(check_one_sided)


def check_replaced(rank: int, find_unused: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, find_unused_parameters=find_unused)
    step_and_check(wrapped, rank, 0)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    wrapped.zero_grad()
    with pytest.raises(RuntimeError, match=r"found another one as 2\.weight"):
        wrapped(batch(1, rank, (8, 20))).sum().backward()
    assert all(p.grad is None for p in wrapped.reducer.params), "half-reduced gradients are left"
    del wrapped  # and its hooks
    again = fusedddp.wrap(model, find_unused_parameters=find_unused)
    for step in range(2):
        step_and_check(again, rank, 2 + step)


@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
def test_a_replaced_parameter_is_named(two_ranks: Ranks, find_unused: bool) -> None:
    two_ranks.run(check_replaced, find_unused)


def check_parametrized(rank: int) -> None:
    """A parametrization moves the parameter elsewhere in the module; it is the same one."""
    model = mlp()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True)
    step_and_check(wrapped, rank, 0)
    torch.nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Tanh())
    wrapped.zero_grad()
    wrapped.module[0](batch(1, rank, (8, 20))).sum().backward()  # 2.weight is unused here
    for step in range(2):
        step_and_check(wrapped, rank, 2 + step)


def test_a_parametrized_parameter_is_no_other_one(two_ranks: Ranks) -> None:
    two_ranks.run(check_parametrized)


def check_dtype(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model)
    step_and_check(wrapped, rank, 0)
    wrapped.double()
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20), torch.float64)).sum().backward()
        want = mean_of_ranks(
            model, lambda m, r, s=step: m(batch(s, r, (8, 20), torch.float64)).sum()
        )
        assert_gradients(wrapped, want)
        assert wrapped.reducer.layout.buckets[0].dtype == torch.float64


def test_another_dtype_is_picked_up(two_ranks: Ranks) -> None:
    two_ranks.run(check_dtype)


def check_group(rank: int) -> None:
    """`_update_process_group` shrinks and grows the set of ranks."""
    model = mlp()
    wrapped = fusedddp.wrap(model)
    step_and_check(wrapped, rank, 0)
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
    wrapped._update_process_group(alone)
    assert wrapped.process_group is alone
    twin = copy.deepcopy(model)
    for step in range(2):
        wrapped.zero_grad()
        twin.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
        twin(batch(step, rank, (8, 20))).sum().backward()
        assert_gradients(wrapped, gradients(twin), exact=True)
    wrapped._update_process_group(torch.distributed.group.WORLD)
    for step in range(2):
        step_and_check(wrapped, rank, 5 + step)
    with pytest.raises(TypeError, match=r"expected a torch\.distributed\.ProcessGroup"):
        wrapped._update_process_group("gloo")
    step_and_check(wrapped, rank, 9)


def test_another_process_group(two_ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        two_ranks.run(check_group)


def check_frozen_after_accumulation(rank: int, zeroed: bool) -> None:
    """What was accumulated before freezing is averaged on all ranks, or zeroed on all."""
    model = Branches(3)
    wrapped = fusedddp.wrap(model, find_unused_parameters=True)
    x = torch.full((3,), float(rank + 1))
    wrapped(x, [0, 1, 2]).backward()
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped(x, [0, 1] if rank == 0 else [0]).backward()
    if zeroed:
        wrapped.zero_grad()
    model.w[1].requires_grad_(False)
    wrapped(x, [0]).backward()
    if zeroed:
        assert model.w[1].grad is None  # not zeros, which a weight decay would act on
    else:
        assert torch.equal(model.w[1].grad, torch.full((3,), 0.5))


@pytest.mark.parametrize("zeroed", [False, True], ids=["kept", "zeroed"])
def test_freezing_after_accumulation(two_ranks: Ranks, zeroed: bool) -> None:
    two_ranks.run(check_frozen_after_accumulation, zeroed)


def check_replaced_module(rank: int, keywords: dict[str, bool]) -> None:
    model = nn.Sequential(nn.Linear(20, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))
    wrapped = fusedddp.wrap(model, **keywords)
    step_and_check(wrapped, rank, 0)
    model[1][1] = nn.Linear(6, 2)  # another head
    for step in range(2):
        wrapped.zero_grad()
        with pytest.raises(RuntimeError, match=r"found another one as 1\.1\.weight"):
            wrapped(batch(1 + step, rank, (8, 20))).sum().backward()


@pytest.mark.parametrize(
    "keywords", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_a_replaced_submodule_is_named(two_ranks: Ranks, keywords: dict[str, bool]) -> None:
    two_ranks.run(check_replaced_module, keywords)


def check_copy_of_frozen(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model)
    step_and_check(wrapped, rank, 0)
    model.requires_grad_(False)
    twin = copy.deepcopy(wrapped)
    assert torch.equal(twin(batch(0, 0, (8, 20))), wrapped(batch(0, 0, (8, 20))))
    twin.requires_grad_(True)
    for step in range(2):
        step_and_check(twin, rank, step)


def test_a_copy_of_a_frozen_wrapper(two_ranks: Ranks) -> None:
    two_ranks.run(check_copy_of_frozen)


def check_replaced_on_one_rank(rank: int) -> None:
    """The rank that replaced a parameter raises; once it has put it back, ranks are in step."""
    model = mlp()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True)
    step_and_check(wrapped, rank, 0)
    original = model[2].weight
    if rank == 1:
        model[2].weight = nn.Parameter(original.detach().clone())
    wrapped.zero_grad()
    loss = wrapped(batch(1, rank, (8, 20))).sum()
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"found another one as 2\.weight"):
            loss.backward()
        model[2].weight = original
    else:
        loss.backward()
    model[0].requires_grad_(False)  # lacks a gradient, so ranks compare what they reduce
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(2 + step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(2 + s, r, (8, 20))).sum())
        assert_gradients(wrapped, want)


def test_an_error_on_one_rank_keeps_the_count_of_rounds(two_ranks: Ranks) -> None:
    two_ranks.run(check_replaced_on_one_rank)

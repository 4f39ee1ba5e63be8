"""`mixed_precision=`: low precision during a step, full precision around it, DDP's own results."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import fusedddp
from fusedddp.mixed_precision import MixedPrecision
from tests.expected import both_views
from tests.models import Branches, batch, gradients, mlp
from tests.ranks import Ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = _MixedPrecision(BF16, BF16, BF16)
_SMALL_MB = 1 / 256  # several buckets, and one gradient larger than a bucket
Loss = Callable[[nn.Module, int], Tensor]


def outputs(model: nn.Module, rank: int, seed: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype if not hasattr(model, "reducer") else FP32
    return model(batch(seed, rank, (8, 20)).to(dtype))


def squares(model: nn.Module, rank: int, seed: int = 0) -> Tensor:
    return outputs(model, rank, seed).square().sum()


def low_gradients(model: nn.Module, loss: Loss, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of a copy of `model` in `dtype`, computed alone; zeros where there is none."""
    alone = copy.deepcopy(model).to(dtype)
    alone.zero_grad()
    loss(alone, rank).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in alone.named_parameters()
        if p.requires_grad
    }


def mean(per_rank: list[dict[str, Tensor]], wire: torch.dtype) -> dict[str, Tensor]:
    """The mean over two ranks, halved and added in `wire`, in full precision."""
    a, b = per_rank
    return {n: ((a[n].float() / 2).to(wire) + (b[n].float() / 2).to(wire)).float() for n in a}


def assert_step(model: nn.Module, loss: Loss, want: nn.Module, dtype: Any, wire: Any) -> None:
    """The gradients are those of a copy of `want` in `dtype`, and everything is full again."""
    expected = mean([low_gradients(want, loss, r, dtype) for r in range(2)], wire)
    for name, gradient in gradients(model).items():
        if name in expected:
            assert gradient is not None and gradient.dtype == FP32, name
            assert torch.equal(gradient, expected[name]), name
    assert_full(model)


def assert_full(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        assert p.dtype == FP32, name
        assert p.grad is None or p.grad.dtype == FP32, name
        assert p._fp_param.data_ptr() == p.data_ptr() and p._fp_param.dtype == FP32, name
        assert p._mp_param.untyped_storage().size() == 0, name


def assert_low(model: nn.Module, dtype: torch.dtype = BF16) -> None:
    for name, p in model.named_parameters():
        assert p.dtype == p._mp_param.dtype == dtype and p._fp_param.dtype == FP32, name
        assert p.data_ptr() == p._mp_param.data_ptr() != p._fp_param.data_ptr(), name


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("shift", torch.full((5,), 0.3))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.shift


def check_parity(rank: int, config: _MixedPrecision, views: bool) -> None:
    # DDP asks for events and streams that a CPU does not have; without them its copies are the
    # same, made one after the other.
    with (
        mock.patch.object(torch, "Event", mock.MagicMock()),
        mock.patch.object(torch, "Stream", mock.MagicMock()),
        mock.patch.object(torch.accelerator, "current_stream", mock.MagicMock()),
    ):
        ours = fusedddp.wrap(
            Buffered(),
            mixed_precision=config,
            bucket_cap_mb=_SMALL_MB,
            gradient_as_bucket_view=views,
        )
        theirs = DistributedDataParallel(
            Buffered(), mixed_precision=config, bucket_cap_mb=_SMALL_MB
        )
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
        squares(theirs, rank).backward()  # its first buckets return memory that nobody wrote
        theirs.zero_grad()
        for step in range(4):
            losses = [squares(model, rank, step) for model in (ours, theirs)]
            assert torch.equal(*losses) and losses[0].dtype == losses[1].dtype
            for loss in losses:
                loss.backward()
            wanted = gradients(theirs)
            for name, gradient in gradients(ours).items():
                assert gradient.dtype == wanted[name].dtype == FP32
                if config.reduce_dtype == FP32:
                    # DDP gives the mean in param_dtype, not always the nearest value in it.
                    torch.testing.assert_close(gradient, wanted[name], rtol=2**-7, atol=0)
                    continue
                # DDP rounds the mean to param_dtype, whatever it was computed in.
                rounded = gradient.to(config.param_dtype).float()
                if config.reduce_dtype == FP16:
                    # Halving before the sum instead of after it costs half of the smallest number.
                    assert (rounded - wanted[name]).abs().max() <= 2**-24, (step, name)
                else:
                    assert torch.equal(rounded, wanted[name]), (step, name)
            if config.reduce_dtype != BF16 or config.param_dtype != BF16:
                ours.zero_grad()
                theirs.zero_grad()
                continue
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(a, b)
        assert ours.module.shift.dtype == theirs.module.shift.dtype
    assert_full(ours)


@both_views
@pytest.mark.parametrize(
    "config",
    [
        LOW,
        _MixedPrecision(FP16, FP16, FP16),
        _MixedPrecision(BF16, FP32, FP32),
        _MixedPrecision(FP16, BF16, FP16),
    ],
    ids=["bf16", "fp16", "bf16-fp32", "fp16-bf16"],
)
def test_parity_with_ddp(two_ranks: Ranks, config: _MixedPrecision, views: bool) -> None:
    two_ranks.run(check_parity, config, views)


def check_wire(rank: int, config: _MixedPrecision, views: bool) -> None:
    """param_dtype, reduce_dtype: what is not given leaves things as they are."""
    dtype = config.param_dtype or FP32
    wire = config.reduce_dtype or dtype
    model = mlp()
    wrapped = fusedddp.wrap(
        model, mixed_precision=config, gradient_as_bucket_view=views, bucket_cap_mb=_SMALL_MB
    )
    assert wrapped.mixed_precision is config
    for step in range(3):
        wrapped.zero_grad(set_to_none=step == 1)

        def loss(m: nn.Module, r: int, seed: int = step) -> Tensor:
            return squares(m, r, seed)

        loss(wrapped, rank).backward()
        assert_step(wrapped, loss, model, dtype, wire)
        assert all(p.grad.stride() == p.stride() for p in model.parameters())
    assert {bucket.dtype for bucket in wrapped.reducer.layout.buckets} == {wire}


@both_views
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"),
    [(BF16, None), (FP16, None), (BF16, FP32), (BF16, FP16), (None, BF16), (None, None)],
)
def test_dtypes_that_gradients_travel_in(
    two_ranks: Ranks, param_dtype: Any, reduce_dtype: Any, views: bool
) -> None:
    two_ranks.run(check_wire, _MixedPrecision(param_dtype, reduce_dtype), views)


class Watched(nn.Module):
    """Checks what it is given, in forward and when it runs again in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 6)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = nn.Parameter(torch.eye(6))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.tied.weight
        self.register_buffer("shift", torch.ones(6))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("phase", torch.ones(6, dtype=torch.cfloat))

    def forward(self, x: Tensor, *, more: dict[str, Tensor] | None = None) -> Tensor:
        if self.shift.dtype == FP16:
            assert_low(self)
            assert x.dtype == BF16 and self.count.dtype == torch.int64
            assert self.phase.dtype == torch.cfloat
            assert more is None or (more["a"].dtype, more["b"].dtype) == (BF16, torch.int64)
        hidden = self.first(x) * self.frozen + self.shift.to(x.dtype)
        return self.last(self.tied(hidden).tanh())


def check_dtypes(rank: int) -> None:
    torch.manual_seed(1)
    model = Watched()
    alone = copy.deepcopy(model)
    wrapped = fusedddp.wrap(model, mixed_precision=_MixedPrecision(BF16, FP32, FP16))
    assert (model.shift.dtype, model.count.dtype) == (FP16, torch.int64)
    assert_full(wrapped)
    for _ in range(3):
        wrapped.zero_grad()
        more = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}
        loss = wrapped(batch(0, rank, (8, 20)), more=more).square().sum()
        assert_low(wrapped)
        copies = [p._mp_param.untyped_storage() for p in model.parameters()]
        loss.backward()
        assert_step(wrapped, squares, alone, BF16, FP32)
        # Only `copies` holds them now.
        assert all(torch._C._storage_Use_Count(each._cdata) == 1 for each in copies)
    assert model.frozen.grad is None
    assert model.last.weight is model.tied.weight


def test_dtypes_during_a_step(two_ranks: Ranks) -> None:
    two_ranks.run(check_dtypes)


def check_ignored(rank: int) -> None:
    model = Buffered()
    model.odd = nn.Parameter(torch.ones(5, dtype=torch.cfloat))
    ignored = ["layers.4.bias", "shift"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = fusedddp.wrap(model, mixed_precision=LOW)
    assert model.shift.dtype == FP32 and model.count.dtype == torch.int64
    with torch.no_grad():
        for name, p in model.named_parameters():
            is_cast = name not in (*ignored, "odd")
            assert hasattr(p, "_mp_param") == hasattr(p, "_fp_param") == is_cast, name

    def forward(x: Tensor) -> Tensor:
        last = model.layers[4]
        assert last.bias.dtype == FP32 and last.weight.dtype == BF16
        hidden = nn.functional.linear(model.layers[:4](x), last.weight, last.bias.to(x.dtype))
        return hidden.float().sum() * model.odd.abs().sum()

    model.forward = forward
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(batch(0, rank, (8, 20))).backward()
        assert model.odd.grad.dtype == torch.cfloat and model.layers[0].weight.grad.dtype == FP32
        assert all(p.dtype != BF16 for p in model.parameters())


def test_what_is_ignored_is_not_cast(two_ranks: Ranks) -> None:
    two_ranks.run(check_ignored)


def check_evaluation(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, mixed_precision=LOW)
    for no_grad in (torch.no_grad, torch.inference_mode):
        with no_grad():
            assert outputs(wrapped, rank).dtype == BF16
        assert_full(wrapped)
    loss = squares(wrapped, rank)
    with torch.no_grad():  # leaves alone what the backward needs
        outputs(wrapped, rank)
    loss.backward()
    assert_step(wrapped, squares, model, BF16, BF16)
    wrapped.zero_grad()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        wrapped(torch.ones(2, 3))
    assert_full(wrapped)


def test_forward_without_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(check_evaluation)


def check_several(rank: int, views: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, mixed_precision=LOW, gradient_as_bucket_view=views)

    def both(m: nn.Module, r: int) -> Tensor:
        return squares(m, r, 1) + squares(m, r, 2)

    for _ in range(3):  # two forwards, one backward
        wrapped.zero_grad()
        both(wrapped, rank).backward()
        assert_step(wrapped, both, model, BF16, BF16)

    def accumulated(losses: list[Callable[[nn.Module, int], Tensor]]) -> dict[str, Tensor]:
        total = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(2)]
        for loss in losses:
            for r in range(2):
                low = low_gradients(model, loss, r, BF16)
                # The first sum is reduced before the second comes, so all ranks have it.
                total[r] = {n: total[r][n] + low[n] for n in low}
            total = [mean(total, BF16)] * 2
        return total[0]

    def second(m: nn.Module, r: int) -> Tensor:
        return squares(m, r, 2)

    for _ in range(2):  # two forwards, two backwards: the copies come back for the second
        wrapped.zero_grad()
        one, two = squares(wrapped, rank), second(wrapped, rank)
        one.backward()
        assert_full(wrapped)
        two.backward()
        assert_full(wrapped)
        for n, want in accumulated([squares, second]).items():
            assert torch.equal(gradients(model)[n], want), n
    wrapped.zero_grad()  # one forward, two backwards
    loss = squares(wrapped, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_full(wrapped)
    for n, want in accumulated([squares, squares]).items():
        assert torch.equal(gradients(model)[n], want), n
    wrapped.zero_grad()
    torch.autograd.grad(squares(wrapped, rank), [model[0].weight])
    assert_full(wrapped)


@both_views
def test_several_forwards_and_backwards(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_several, views)


def check_accumulation(rank: int, views: bool, set_to_none: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(
        model, mixed_precision=LOW, gradient_as_bucket_view=views, bucket_cap_mb=_SMALL_MB
    )
    for step in range(3):
        wrapped.zero_grad(set_to_none=set_to_none)
        sums = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(2)]
        for micro in range(3):

            def loss(m: nn.Module, r: int, seed: int = 10 * step + micro) -> Tensor:
                return squares(m, r, seed)

            for r in range(2):
                low = low_gradients(model, loss, r, BF16)
                sums[r] = {n: total + low[n].float() for n, total in sums[r].items()}
            if micro < 2:
                with wrapped.no_sync():
                    loss(wrapped, rank).backward()
                want = sums[rank]
            else:
                loss(wrapped, rank).backward()
                want = mean(sums, BF16)
            assert_full(wrapped)
            for n, gradient in gradients(model).items():
                assert torch.equal(gradient, want[n]), (step, micro, n)


@both_views
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_no_sync_adds_in_full_precision(two_ranks: Ranks, views: bool, set_to_none: bool) -> None:
    two_ranks.run(check_accumulation, views, set_to_none)


def check_unused(rank: int, views: bool, keyword: str) -> None:
    model = Branches()
    wrapped = fusedddp.wrap(
        model, mixed_precision=LOW, gradient_as_bucket_view=views, **{keyword: True}
    )
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor(rank + 1.25), [0, 1 + rank]).backward()
        assert_full(wrapped)
        values = [None if p.grad is None else p.grad.tolist() for p in model.w]
        assert values == [[1.75] * 3, [0.625] * 3, [1.125] * 3, None]


@both_views
@pytest.mark.parametrize("keyword", ["find_unused_parameters", "static_graph"])
def test_unused_parameters(two_ranks: Ranks, views: bool, keyword: str) -> None:
    two_ranks.run(check_unused, views, keyword)


def fail(_: Tensor) -> None:
    raise ZeroDivisionError


def check_failure(rank: int, views: bool) -> None:
    model = mlp()
    start = copy.deepcopy(model)
    wrapped = fusedddp.wrap(model, mixed_precision=LOW, gradient_as_bucket_view=views)
    for step in range(3):
        wrapped.zero_grad()
        handle = model[2].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            squares(wrapped, rank).backward()
        handle.remove()
        if step == 1:
            with torch.no_grad():
                outputs(wrapped, rank)
            assert_full(wrapped)
        loss = squares(wrapped, rank)
        assert_low(wrapped)
        wrapped.zero_grad()
        loss.backward()
        assert_step(wrapped, squares, start, BF16, BF16)


@both_views
def test_a_backward_that_fails(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_failure, views)


class Hidden(nn.Module):
    """Returns an object that nobody looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Any:
        holder = type("Holder", (), {})()
        holder.loss = self.layers(x).square().sum()
        return holder


def check_hidden(rank: int) -> None:
    model = Hidden()
    wrapped = fusedddp.wrap(model, mixed_precision=LOW)

    def loss(m: nn.Module, r: int) -> Tensor:
        dtype = FP32 if m is wrapped else BF16
        return m(batch(0, r, (8, 20)).to(dtype)).loss

    for step in range(4):
        wrapped.zero_grad()
        if step == 2:  # the next backward finds that this one ended in an exception
            failing, good = loss(wrapped, rank), loss(wrapped, rank)
            handle = model.layers[2].weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                failing.backward()
            handle.remove()
            good.backward()
            assert_full(wrapped)
        else:
            loss(wrapped, rank).backward()
            assert_step(wrapped, loss, model, BF16, BF16)


def test_outputs_that_carry_no_hook(two_ranks: Ranks) -> None:
    two_ranks.run(check_hidden)


class Saving(nn.Module):
    """Takes its own state dict in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.saves = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[:2](x)
        if self.saves:
            self.state = self.state_dict()
        return self.layers[2:](hidden)


def check_state_dict(rank: int) -> None:
    model = Saving()
    start = copy.deepcopy(model.state_dict())
    wrapped = fusedddp.wrap(model, mixed_precision=LOW)
    prefixed = {f"module.{name}": value for name, value in start.items()}

    def assert_same(state: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        assert list(state) == list(want)
        for name, value in state.items():
            assert value.dtype == FP32 and torch.equal(value, want[name]), name

    for _ in range(2):
        wrapped.zero_grad()
        model.saves = True
        loss = squares(wrapped, rank)
        model.saves = False
        assert_same(model.state, start)
        assert_same(model.state_dict(), start)
        assert_same(wrapped.state_dict(), prefixed)
        assert_low(wrapped)
        assert_same(wrapped.state_dict(keep_vars=True), prefixed)
        loss.backward()
        assert_step(wrapped, squares, model, BF16, BF16)
    changed = {name: value + 1 for name, value in prefixed.items()}
    wrapped.zero_grad()
    squares(wrapped, rank)  # no backward follows
    wrapped.load_state_dict(changed)
    assert_same(wrapped.state_dict(), changed)
    wrapped.zero_grad()
    squares(wrapped, rank).backward()
    assert_step(wrapped, squares, model, BF16, BF16)
    assert_same(wrapped.state_dict(), changed)


def test_state_dict_at_any_time(two_ranks: Ranks) -> None:
    two_ranks.run(check_state_dict)


def check_copies(rank: int) -> None:
    model = Buffered()
    wrapped = fusedddp.wrap(model, mixed_precision=LOW)
    for _ in range(2):
        wrapped.zero_grad()
        squares(wrapped, rank).backward()
    loss = squares(wrapped, rank)
    saved = io.BytesIO()
    torch.save(copy.deepcopy(wrapped), saved)
    saved.seek(0)
    twins = [
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        torch.load(saved, weights_only=False),
        fusedddp.wrap(copy.deepcopy(model), mixed_precision=LOW),
    ]
    wrapped.zero_grad()
    loss.backward()
    want = gradients(model)
    for twin in twins:
        assert_full(twin)
        assert twin.module.shift.dtype == BF16 and twin.mixed_precision == LOW
        for _ in range(2):
            twin.zero_grad()
            squares(twin, rank).backward()
            assert_full(twin)
            assert all(torch.equal(g, want[n]) for n, g in gradients(twin).items())


def test_copies(two_ranks: Ranks) -> None:
    two_ranks.run(check_copies)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):

            def run(x: Tensor, block: nn.Module = block) -> Tensor:
                return block(x).tanh() * block.weight.sum()

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x


def check_checkpoints(rank: int, reentrant: bool, outside: bool) -> None:
    model = Checkpointed(reentrant)
    wrapped = fusedddp.wrap(model, mixed_precision=LOW)

    def loss(m: nn.Module, r: int) -> Tensor:
        inputs = batch(0, r, (8, 20)).to(FP32 if m is wrapped else BF16).requires_grad_()
        out = checkpoint(m, inputs, use_reentrant=reentrant) if outside else m(inputs)
        return out.square().sum()

    for _ in range(3):
        wrapped.zero_grad()
        loss(wrapped, rank).backward()
        assert_step(wrapped, loss, model, BF16, BF16)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("outside", [True, False], ids=["around", "within"])
def test_checkpointing(two_ranks: Ranks, reentrant: bool, outside: bool) -> None:
    two_ranks.run(check_checkpoints, reentrant, outside)


def check_end_of_wrapper(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, mixed_precision=LOW)
    squares(wrapped, rank)
    assert_low(model)
    del wrapped
    gc.collect()
    assert_full(model)
    assert not model._state_dict_pre_hooks and not model._load_state_dict_pre_hooks
    wrapped = fusedddp.wrap(model.double(), mixed_precision=LOW)
    model.float()
    with pytest.raises(RuntimeError, match=r"expected 0\.weight to be of torch\.float64.*float32"):
        wrapped(batch(0, rank, (8, 20)))


def test_the_module_outlives_its_wrapper(two_ranks: Ranks) -> None:
    two_ranks.run(check_end_of_wrapper)


def check_refused(rank: int, config: Any, only_on: int | None) -> tuple[str, str]:
    config = config if only_on in (None, rank) else None
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        fusedddp.wrap(mlp(), mixed_precision=config)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        (BF16, "TypeError", "_MixedPrecision, found torch.bfloat16 (dtype). Pass for example"),
        (
            _MixedPrecision(param_dtype="bf16"),
            "TypeError",
            "expected a torch.dtype or None as param_dtype, found 'bf16' (str). Pass a dtype",
        ),
        (
            _MixedPrecision(reduce_dtype=torch.int32),
            "ValueError",
            "as reduce_dtype, found torch.int32. Pass one of them, or None to leave it as it is.",
        ),
        (_MixedPrecision(buffer_dtype=torch.cfloat), "ValueError", "as buffer_dtype, found"),
    ],
)
def test_bad_configurations(two_ranks: Ranks, config: Any, kind: str, text: str) -> None:
    for found_kind, found_text in two_ranks.run(check_refused, config, None):
        assert found_kind == kind and text in found_text


def test_configurations_that_differ_between_ranks(two_ranks: Ranks) -> None:
    for kind, text in two_ranks.run(check_refused, LOW, 1):
        assert kind == "RuntimeError"
        assert "rank 0 has [grad_dtype=None], rank 1 has [grad_dtype=torch.bfloat16]" in text


def test_copies_keep_strides_unless_they_leave_gaps() -> None:
    module = nn.Module()
    module.turned = nn.Parameter(torch.randn(4, 6).t())
    module.image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
    module.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2].t())
    module.same = nn.Parameter(torch.randn(3).bfloat16())
    strides = {name: p.stride() for name, p in module.named_parameters()}
    values = copy.deepcopy(module.state_dict())
    precision = MixedPrecision(_MixedPrecision(param_dtype=BF16), module, ())
    with precision.lowered(keep=False):
        assert module.same._mp_param.numel() == 0  # it needs no copy
        for name, p in module.named_parameters():
            assert torch.equal(p, values[name].bfloat16())
            assert p.is_contiguous() if name == "gaps" else p.stride() == strides[name]
    for name, p in module.named_parameters():
        assert p.stride() == strides[name] and torch.equal(p, values[name])

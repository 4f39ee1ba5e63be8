"""`check_capturable`: what it finds, on which line, and that it finds nothing in what is fine.

A line that is to be found says so in a comment, ``# finds: kind``; ``# cannot tell: kind`` is for
what a run on CPUs does not decide. Steps without such comments are fine.
"""

from __future__ import annotations

import copy
import inspect
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint

import fusedddp
from fusedddp.capture_report import CaptureReport
from fusedddp.capture_rules import OPTIMIZERS

ROOT = Path(__file__).parent.parent


def expected_of(step: Any, word: str) -> Counter[tuple[str, int]]:
    lines, first = inspect.getsourcelines(step)
    found = [re.search(rf"# {word}: ([\w, -]+)", line) for line in lines]
    return Counter(
        (kind, first + i) for i, m in enumerate(found) if m for kind in m.group(1).split(", ")
    )


def check(step: Callable[..., Any], *args: Any, **kwargs: Any) -> CaptureReport:
    """Checks a step, and its report against the comments in it."""
    return check_against(step, step, *args, **kwargs)


def check_against(source: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    report = fusedddp.check_capturable(step, *args, **kwargs)
    assert Counter((f.kind, f.line) for f in report.findings) == expected_of(source, "finds")
    assert Counter((f.kind, f.line) for f in report.undecided) == expected_of(source, "cannot tell")
    assert {f.file for f in (*report.findings, *report.undecided)} <= {__file__}
    assert report.ok == (not report.findings)
    return report


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 4)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


# -- steps that cannot be captured ----------------------------------------------------------------


def reads(x: Tensor) -> None:
    total = x.sum()
    total.item()  # finds: host-sync
    float(total)  # finds: host-sync
    int(total)  # finds: host-sync
    x.tolist()  # finds: host-sync
    x.numpy()  # finds: host-sync
    np.asarray(x)  # finds: host-sync
    total.is_nonzero()  # finds: host-sync
    torch.equal(x, x)  # finds: host-sync
    torch.allclose(x, x)  # finds: host-sync


def copies_to_the_host(x: Tensor) -> None:
    x.cpu()  # finds: host-sync
    x.to("cpu")  # finds: host-sync
    x.to(device="cpu", dtype=torch.float64)  # finds: host-sync
    x.to(torch.device("cpu"))  # finds: host-sync


def branches(x: Tensor) -> None:
    if x.sum() > 0:  # finds: host-sync
        x = x + 1
    while x.sum() < 0:  # finds: host-sync
        x = x + 1
    assert 3.0 not in x  # finds: host-sync
    max(x[0, 0], x[0, 1])  # finds: host-sync


def counts_and_slices(x: Tensor) -> None:
    count = (x > 9).sum()
    x[:count]  # finds: host-sync
    range(count)  # finds: host-sync
    torch.arange(count, device=x.device)  # finds: host-sync
    x.add(x, alpha=x[0, 0])  # finds: host-sync


def prints(x: Tensor) -> None:
    print(x.sum())  # finds: host-sync
    f"{x.sum():.3f}"  # finds: host-sync
    str(x)  # finds: host-sync


def waits(x: Tensor) -> None:
    torch.cuda.synchronize()  # finds: host-sync


def library_code_that_reads(x: Tensor) -> None:
    torch.linalg.inv(x[:4])  # finds: host-sync
    torch.distributions.Normal(x, x.abs() + 1)  # finds: host-sync
    torch.multinomial(x.abs(), 2)  # finds: host-sync


def shapes(x: Tensor) -> None:
    x.nonzero()  # finds: data-dependent-shape
    torch.where(x > 0)  # finds: data-dependent-shape
    torch.argwhere(x)  # finds: data-dependent-shape
    x[x > 0]  # finds: data-dependent-shape
    torch.masked_select(x, x > 0)  # finds: data-dependent-shape
    torch.unique(x)  # finds: data-dependent-shape
    torch.unique_consecutive(x)  # finds: data-dependent-shape
    torch.unique(x, dim=0)  # finds: data-dependent-shape
    labels = x.abs().long()
    torch.bincount(labels.flatten())  # finds: data-dependent-shape
    torch.repeat_interleave(x, labels[:, 0], dim=0)  # finds: data-dependent-shape
    nn.functional.one_hot(labels)  # finds: data-dependent-shape


def mask_assignments_of_tensors(x: Tensor) -> None:
    y = x.clone()
    y[y > 0] = x[0, 0]  # finds: data-dependent-shape
    y[y > 9] = y.new_zeros(0)  # finds: data-dependent-shape


def copies_from_the_host(x: Tensor) -> None:
    torch.tensor([1.0, 2.0], device=x.device)  # finds: host-copy
    torch.tensor(1.0, device=x.device)  # finds: host-copy
    torch.as_tensor(np.ones(2), device=x.device)  # finds: host-copy
    x.new_tensor([1.0])  # finds: host-copy
    torch.tensor(1.0).to(x.device)  # finds: host-copy
    x[[0, 1]]  # finds: host-copy


def tensors_on_the_cpu(x: Tensor) -> None:
    torch.tensor([1.0, 2.0])  # finds: cpu-tensor
    torch.tensor([1.0, 2.0]).to(x.device)  # finds: cpu-tensor
    torch.from_numpy(np.ones(2))  # finds: cpu-tensor
    torch.FloatTensor([1.0])  # finds: cpu-tensor
    torch.zeros(2)  # finds: cpu-tensor
    torch.zeros(2, device="cpu")  # finds: cpu-tensor
    torch.arange(2).cuda()  # finds: cpu-tensor
    torch.randperm(2)  # finds: cpu-tensor


def python_random(x: Tensor) -> None:
    random.random()  # finds: python-random
    random.randint(0, 3)  # finds: python-random
    random.Random(0).uniform(0, 1)  # finds: python-random
    np.random.rand()  # finds: python-random
    np.random.permutation(3)  # finds: python-random


def clock(x: Tensor) -> None:
    time.time()  # finds: time
    perf_counter()  # finds: time


def seeds(x: Tensor) -> None:
    torch.manual_seed(0)  # finds: torch-seed


def saves(x: Tensor) -> None:
    torch.save(x, "/dev/null")  # finds: host-sync


def moves_arguments(x: Tensor) -> None:
    device = torch.device(x.device)
    x.to(device)  # cannot tell: device-move
    x.cuda()  # cannot tell: device-move


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grads[0].cpu()  # finds: host-sync
        return grads[0] * grads[0].sum().item()  # finds: host-sync


def reads_below_the_loss(x: Tensor) -> None:
    weight = nn.Parameter(x.clone())
    weight.register_hook(lambda grad: print(grad))  # finds: host-sync
    (weight * 2).sum().backward()


def mask_indexing_with_backward(x: Tensor) -> None:
    weight = nn.Parameter(x.clone())
    kept = weight[x > 0]  # finds: data-dependent-shape
    kept.sum().backward()  # scatters through the mask, which is the fault of the line above


def gather_of_objects(x: Tensor) -> None:
    dist.all_gather_object([None], 3)  # finds: host-sync
    dist.barrier()  # finds: host-sync
    dist.all_reduce(x.clone())


@pytest.mark.parametrize(
    "step",
    [
        reads, copies_to_the_host, branches, counts_and_slices, prints, waits,
        library_code_that_reads, shapes, mask_assignments_of_tensors, copies_from_the_host,
        tensors_on_the_cpu, python_random, clock, seeds, saves, moves_arguments,
        reads_below_the_loss, mask_indexing_with_backward,
    ],
)  # fmt: skip
def test_finds(step: Callable[[Tensor], None], x: Tensor) -> None:
    check(step, x)


def test_finds_generators_of_numpy(x: Tensor) -> None:
    generator, other = np.random.default_rng(0), np.random.default_rng(0)

    def step(given: Any) -> None:  # finds: python-random
        assert other is not generator
        x.mul(given.beta(1.0, 1.0))

    check(step, generator)
    assert fusedddp.check_capturable(lambda: other.bit_generator).ok


def test_finds_older_generators_of_numpy(x: Tensor) -> None:
    generator = np.random.RandomState(0)

    def step() -> None:  # finds: python-random
        x.mul(generator.rand())

    check(step)


def test_finds_what_averaged_models_read(x: Tensor) -> None:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)

    def step() -> None:
        average.update_parameters(model)  # finds: host-sync

    check(step)


def test_finds_object_collectives(group: None, x: Tensor) -> None:
    check(gather_of_objects, x)


def test_finds_reads_in_a_backward(x: Tensor) -> None:
    def step() -> None:
        weight = nn.Parameter(x.clone())
        ReadsInBackward.apply(weight).sum().backward()

    check_against(ReadsInBackward, step)


def test_the_line_is_in_the_callers_code_when_the_step_has_none(x: Tensor) -> None:
    report = fusedddp.check_capturable(torch.nonzero, x)
    (finding,) = report.findings
    assert finding.file == __file__
    assert finding.place.source == "report = fusedddp.check_capturable(torch.nonzero, x)"


# -- steps that can be ----------------------------------------------------------------------------


def fine_tensor_code(x: Tensor) -> None:
    y = torch.where(x > 0, x, 0) + torch.zeros(4, device=x.device) + torch.zeros_like(x)
    y[y > 0] = 0
    y.masked_fill_(x > 0, 1.0)
    y = y + torch.tensor(1.0)  # read at the launch, like a constant
    torch.repeat_interleave(y, torch.ones_like(y[:, 0]).long(), dim=0, output_size=6)
    torch.repeat_interleave(y, 2, dim=0)
    nn.functional.one_hot(x.abs().long(), 9)
    torch.rand(3, device=x.device)
    torch.full((), 2.0, device=x.device)
    y[0], y[1:3], y[x.argmax(0)]
    for row in y:
        row.sum()
    assert y.shape == x.shape and len(y) == 6 and y.is_floating_point()
    y.to(torch.float64).to(y)
    y.to(y.device)  # not meant: "cpu", ("cpu")
    place = str(x.device)
    y.to(place) if place != "cpu" else y.to(place, torch.float64)
    copy.deepcopy(y)


def fine_modules(x: Tensor) -> None:
    embedding = nn.Embedding(9, 4, device=x.device)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, device=x.device)
    words = x.abs().long()
    hidden = nn.functional.dropout(encoder(embedding(words)), 0.5)
    hidden[hidden > 1] = 0  # and its backward
    hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
    nn.functional.cross_entropy(hidden.flatten(0, 1), words.flatten() % 4).backward()


@pytest.mark.parametrize("step", [fine_tensor_code, fine_modules])
def test_finds_nothing(step: Callable[[Tensor], None], x: Tensor) -> None:
    check(step, x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_finds_nothing_in_a_training_step(x: Tensor, autocast: bool, clip: bool) -> None:
    model = nn.Sequential(net(), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-3), fused=True, capturable=True
    )
    LambdaLR(optimizer, lambda epoch: 0.9**epoch)

    def step(inputs: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(inputs).float().square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    for _ in range(2):
        check(step, x)


def test_finds_nothing_in_an_optimizer_whose_cpu_form_reads(x: Tensor) -> None:
    """capturable=True alone, which torch refuses on a CPU outside of a check."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    with pytest.raises(AssertionError, match="capturable"):
        training_step(model, optimizer)(x)
    check_against(training_step, training_step(model, optimizer), x)
    assert optimizer.param_groups[0]["capturable"] is True
    assert optimizer.param_groups[0]["foreach"] is None


def training_step(
    model: nn.Module, optimizer: Optimizer, between: Callable[[], Any] = lambda: None
) -> Callable[[Tensor], None]:
    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        between()
        optimizer.step()

    return step


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(x: Tensor, reentrant: bool) -> None:
    model = net()

    def step() -> None:
        inputs = x.detach().requires_grad_()
        checkpoint(
            model, inputs, use_reentrant=reentrant, preserve_rng_state=False
        ).sum().backward()

    def keeps_rng() -> None:
        inputs = x.detach().requires_grad_()
        hidden = checkpoint(model, inputs, use_reentrant=reentrant)  # cannot tell: checkpoint-rng
        hidden.sum().backward()

    check(step)
    check(keeps_rng)


def test_code_that_checkpointing_runs_again_is_seen(x: Tensor) -> None:
    def step() -> None:
        def part(value: Tensor) -> Tensor:
            value.cpu()  # finds: host-sync
            return value * 2

        inputs = x.detach().requires_grad_()
        checkpoint(part, inputs, use_reentrant=False, preserve_rng_state=False).sum().backward()

    check(step)


@pytest.mark.parametrize("keywords", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_finds_nothing_in_the_wrapper(group: None, x: Tensor, keywords: Any) -> None:
    model = fusedddp.wrap(net(), **keywords)
    step = training_step(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for _ in range(3):
        check_against(training_step, step, x)


def test_comm_hooks(group: None, x: Tensor) -> None:
    def unknown(state: Any, bucket: Any) -> Any:
        return default_hooks.allreduce_hook(state, bucket)

    def reads_its_bucket(state: Any, bucket: Any) -> Any:
        bucket.buffer().sum().item()  # finds: host-sync
        return default_hooks.allreduce_hook(state, bucket)

    for hook, found, undecided in (
        (default_hooks.bf16_compress_hook, [], []),
        (unknown, [], ["comm-hook"]),
        (reads_its_bucket, list(expected_of(reads_its_bucket, "finds")), ["comm-hook"]),
    ):
        model = fusedddp.wrap(net())
        model.register_comm_hook(None, hook)
        step = training_step(model, torch.optim.SGD(model.parameters(), 0.1))
        report = fusedddp.check_capturable(step, x)
        assert [(f.kind, f.line) for f in report.findings] == found
        assert [f.kind for f in report.undecided] == undecided


def test_torch_ddp_is_left_open(group: None, x: Tensor) -> None:
    model = DistributedDataParallel(net())
    step = training_step(model, torch.optim.SGD(model.parameters(), 0.1))
    report = fusedddp.check_capturable(step, x)
    assert report.ok
    assert [f.kind for f in report.undecided] == ["torch-ddp"]


# -- optimizers, schedulers, scalers --------------------------------------------------------------

ADAM = {"lr": 0.1, "fused": True, "capturable": True}
OPTIMIZER_CASES: list[tuple[Any, dict[str, Any], str | None]] = [
    (torch.optim.SGD, {"lr": 0.1}, None),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, None),
    (torch.optim.SGD, {"lr": torch.tensor(0.1)}, "fused=True"),
    (torch.optim.SGD, {"lr": torch.tensor(0.1), "fused": True}, None),
    (torch.optim.Adagrad, {}, "fused=True"),
    (torch.optim.Adagrad, {"fused": True}, None),
    (torch.optim.Adafactor, {}, "AdamW"),
    (torch.optim.RMSprop, {"lr": torch.tensor(0.1), "capturable": True}, None),
    (
        torch.optim.RMSprop,
        {"lr": torch.tensor(0.1), "capturable": True, "foreach": False},
        "foreach=True",
    ),
    (torch.optim.Adam, {"fused": True}, "fused=True, capturable=True"),
    (torch.optim.Adam, ADAM, None),
    (torch.optim.AdamW, {**ADAM, "lr": torch.tensor(0.1)}, None),
]
for _cls in (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "RMSprop", "Adadelta"
):  # fmt: skip
    OPTIMIZER_CASES.append((getattr(torch.optim, _cls), {}, "capturable=True"))
    OPTIMIZER_CASES.append((getattr(torch.optim, _cls), {"capturable": True}, None))


@pytest.mark.parametrize(("cls", "keywords", "remedy"), OPTIMIZER_CASES)
def test_optimizers(x: Tensor, cls: Any, keywords: dict[str, Any], remedy: str | None) -> None:
    model = nn.Linear(4, 2)
    step = training_step(model, cls(model.parameters(), **keywords))
    report = fusedddp.check_capturable(step, x)
    assert [f.kind for f in report.findings] == (["optimizer"] if remedy else [])
    if remedy:
        assert remedy in report.findings[0].remedy
        assert report.findings[0].place.source == "optimizer.step()"
    assert not report.undecided


def test_every_optimizer_of_torch_is_known() -> None:
    theirs = {
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    assert theirs == set(OPTIMIZERS)


def test_lbfgs_and_sparse_gradients(x: Tensor) -> None:
    linear, embedding = nn.Linear(4, 2), nn.Embedding(9, 4, sparse=True)
    lbfgs = torch.optim.LBFGS(linear.parameters())
    sgd = torch.optim.SGD(embedding.parameters(), 0.1)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = linear(x).square().sum()
        loss.backward()
        return loss

    def step() -> None:
        lbfgs.step(closure)  # finds: optimizer
        embedding(x.abs().long()).sum().backward()
        sgd.step()  # finds: data-dependent-shape

    check(step)


class OwnOptimizer(Optimizer):
    """One that nothing is known of, with a step that would be found if it were the step's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad.norm() > 0:  # cannot tell: host-sync
                    param.data.sub_(param.grad, alpha=group["lr"])


class RenamedAdamW(torch.optim.AdamW):
    """Inherits its step, so that the same holds for it."""


def test_other_optimizers(x: Tensor) -> None:
    model = nn.Linear(4, 2)
    report = fusedddp.check_capturable(training_step(model, OwnOptimizer(model.parameters())), x)
    assert report.ok
    assert [f.kind for f in report.undecided] == ["optimizer", "host-sync"]
    step = training_step(model, RenamedAdamW(model.parameters()))
    assert [f.kind for f in fusedddp.check_capturable(step, x).findings] == ["optimizer"]


def test_schedulers(x: Tensor) -> None:
    model = net()
    with_float = torch.optim.SGD(model.parameters(), 0.1)
    with_tensor = torch.optim.SGD(model.parameters(), torch.tensor(0.1), fused=True)
    LambdaLR(with_float, lambda epoch: 1.0)
    scheduler = LambdaLR(with_tensor, lambda epoch: 1.0)
    plateau = ReduceLROnPlateau(with_tensor)

    def step() -> None:
        model(x).sum().backward()
        with_float.step()  # finds: frozen-lr
        with_tensor.step()
        scheduler.step()  # finds: scheduler-step
        plateau.step(1.0)  # finds: scheduler-step

    (frozen, _, _) = check(step).findings
    assert frozen.remedy == "construct SGD with lr=torch.tensor(lr, device=...), fused=True."


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_grad_scaler(x: Tensor) -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    fused = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    scaler, for_cuda = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cuda")

    def step() -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(plain)  # finds: grad-scaler
        scaler.step(fused)
        scaler.update()
        scaler.get_scale()  # finds: host-sync

    def step_for_cuda() -> None:
        for_cuda.scale(model(x).sum()).backward()
        for_cuda.step(plain)  # cannot tell: grad-scaler
        for_cuda.step(fused)
        for_cuda.update()

    check(step)
    if not torch.cuda.is_available():
        check(step_for_cuda)


def test_clipping_that_raises(x: Tensor) -> None:
    model = net()

    def step() -> None:
        model(x).sum().backward()
        params = model.parameters()
        nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)  # finds: host-sync

    (finding,) = check(step).findings
    assert "error_if_nonfinite" in finding.message


def test_a_number_as_an_argument_is_left_open(x: Tensor) -> None:
    def step(inputs: Tensor, weight: float, *, flag: bool) -> None:
        inputs.mul(weight)

    report = fusedddp.check_capturable(step, x, 0.5, flag=True)
    assert report.ok
    (note,) = report.undecided
    assert note.kind == "python-number" and "weight is a number, 0.5" in note.message


# -- the report, and what the check leaves behind -------------------------------------------------


def test_report(x: Tensor) -> None:
    def step() -> None:
        x.sum().item()  # finds: host-sync
        x.sum().item(), x.sum().item()  # finds: host-sync

    report = check(step)
    first = expected_of(step, "finds").most_common()[0][0][1]
    text = str(report)
    assert "2 findings" in text
    assert f"host-sync: {__file__}:{first}\n    x.sum().item()  # finds" in text
    assert "Do: keep the value in a tensor" in text
    with pytest.raises(RuntimeError, match=r"expected a step that can be captured"):
        report.raise_if_bad()
    fine = fusedddp.check_capturable(lambda: None)
    fine.raise_if_bad()
    assert fine.ok and str(fine).startswith("Nothing was found")


def test_the_step_leaves_what_one_eager_step_leaves(x: Tensor) -> None:
    def run(call: Callable[[Callable[[], None]], Any]) -> list[Any]:
        model = nn.Sequential(net(), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scheduler = LambdaLR(optimizer, lambda epoch: 0.5)
        random.seed(0), np.random.seed(0)
        count = [0]

        def step() -> None:
            count[0] += 1
            loss = model(x).sum() * random.random() * np.random.rand()
            loss.backward()
            optimizer.step()
            scheduler.step()

        call(step)
        grads = [p.grad for p in model.parameters()]
        steps = [s for state in optimizer.state.values() for s in state.values()]
        rate, rng = optimizer.param_groups[0]["lr"], torch.get_rng_state()
        return [*model.state_dict().values(), *grads, *steps, rng, rate, random.random(), count]

    checked, eager = run(fusedddp.check_capturable), run(lambda step: step())
    assert len(checked) == len(eager)
    for ours, theirs in zip(checked, eager, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def patched_state() -> list[Any]:
    from torch.nn.modules import module
    from torch.optim import lr_scheduler, optimizer
    from torch.overrides import _get_current_function_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    modules: list[Any] = [random, random.Random, np.random, time, torch, torch.cuda, torch.autograd]
    modules += [lr_scheduler.LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler]
    return [
        *(dict(vars(owner)) for owner in modules),
        perf_counter,
        dict(module._global_forward_pre_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        _get_current_function_mode(),
        _get_current_dispatch_mode(),
    ]


class OwnError(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", None])
def test_everything_is_put_back(x: Tensor, where: str | None) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def fail(*_: Any) -> None:
        raise OwnError(where)

    if where == "backward":
        next(model.parameters()).register_hook(fail)
    if where == "optimizer":
        optimizer.register_step_pre_hook(fail)
        optimizer.register_step_post_hook(fail)

    def step() -> None:
        loss = model(x).sum()
        if where == "forward":
            fail()
        loss.backward()
        optimizer.step()

    fusedddp.check_capturable(lambda: None)  # imports what is imported late
    before = patched_state()
    if where is None:
        fusedddp.check_capturable(step)
    else:
        with pytest.raises(OwnError, match=where):
            fusedddp.check_capturable(step)
    after = patched_state()
    assert before == after
    assert optimizer.param_groups[0]["capturable"] is True
    fusedddp.check_capturable(lambda: None)  # and another check can run


# -- wrong use ------------------------------------------------------------------------------------


async def coroutine() -> None:
    pass


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (None, "found None"),
        (3.0, "found 3.0"),
        (nn.Linear(2, 2), "found a module, Linear"),
        (nn.Linear, "class 'torch.nn"),
        (coroutine, "does not run when it is called"),
        (generator, "does not run when it is called"),
    ],
)
def test_what_is_no_step_is_refused(step: Any, found: str) -> None:
    with pytest.raises(TypeError, match="expected a function that runs one training step") as error:
        fusedddp.check_capturable(step)
    assert found in str(error.value)
    assert "Pass " in str(error.value)


def test_checks_do_not_nest(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="expected no other check to be running"):
        fusedddp.check_capturable(lambda: fusedddp.check_capturable(reads, x))
    check(reads, x)


# -- the command line -----------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import fusedddp

weight = torch.nn.Parameter(torch.ones(3))

def bad():
    weight.sum().item()

def fine():
    weight.sum().backward()

def make():
    return lambda x, y: (x + y).sum().backward(), (weight, weight)

def makes_too_much():
    return fine, 1, 2

def joins():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = fusedddp.wrap(torch.nn.Linear(2, 2))
    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss.tolist()
    return step, (torch.ones(1, 2),)

class Trainer:
    def bad(self):
        bad()

trainer = Trainer()

def takes_one(x):
    pass

def leaves():
    sys.exit(0)

def raises():
    raise KeyError("the script's own")

if __name__ == "__main__":
    raise SystemExit("the main part ran")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module", autouse=True)
def processes(script: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The command in processes of its own, started first so that they run beside other tests."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "fusedddp.check"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    started = {
        name: subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **path},
        )
        for name, arguments in {
            "alone": [*command, f"{script}:bad"],
            "torchrun": [*torchrun, *command, f"{script}:joins"],
        }.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_command_line(script: Path, processes: dict[str, subprocess.Popen[str]]) -> None:
    out, err = processes["alone"].communicate(timeout=100)
    assert processes["alone"].returncode == 1, err
    assert f"host-sync: {script}:9\n    weight.sum().item()\n" in out
    assert err == ""


def test_command_line_under_torchrun(
    script: Path, processes: dict[str, subprocess.Popen[str]]
) -> None:
    out, err = processes["torchrun"].communicate(timeout=100)
    assert processes["torchrun"].returncode == 1, err
    for rank in (0, 1):
        assert f"[rank {rank}] host-sync: {script}:27\n" in out, out


@pytest.mark.parametrize(
    ("name", "status", "out", "err"),
    [
        ("fine", 0, "Nothing was found", ""),
        ("make", 0, "Nothing was found", ""),
        ("bad", 1, "1 finding", ""),
        ("makes_too_much", 2, "", "expected makes_too_much() to return (step, args)"),
        ("raises", 2, "", 'KeyError: "the script\'s own"'),
        ("leaves", 2, "", "SystemExit: 0"),
        ("trainer.bad", 1, "1 finding", ""),
    ],
)
def test_command(
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    status: int,
    out: str,
    err: str,
) -> None:
    from fusedddp import check as command

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command.main([f"{script}:{name}"]) == status
    printed = capsys.readouterr()
    assert out in printed.out
    assert err in printed.err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", "expected script.py:function, found 'train.py'"),
        ("nowhere.py:step", "found nothing at 'nowhere.py'"),
        ("{script}:nothing", "expected a function 'nothing'"),
        ("{script}:trainer.nothing.at_all", "found nothing. Functions there: bad, fine"),
        ("{script}:takes_one", "one that takes some (missing a required argument: 'x')"),
        ("{script}:weight", "found a Parameter. Functions there: bad, fine, make"),
    ],
)
def test_command_used_wrongly(
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    message: str,
) -> None:
    from fusedddp import check as command

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as error:
        command.main([target.format(script=script)])
    assert error.value.code == 2
    assert message in capsys.readouterr().err

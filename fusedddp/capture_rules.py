"""What stands against a capture, as tables: tensor methods, operators and optimizers.

Everything here was read in torch 2.13. Judgement only: nothing is watched or patched here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

HOST_SYNC = "host-sync"
DATA_DEPENDENT_SHAPE = "data-dependent-shape"
HOST_COPY = "host-copy"
CPU_TENSOR = "cpu-tensor"
PYTHON_RANDOM = "python-random"
TIME = "time"
TORCH_SEED = "torch-seed"
OPTIMIZER = "optimizer"
FROZEN_LR = "frozen-lr"
SCHEDULER_STEP = "scheduler-step"
GRAD_SCALER = "grad-scaler"
COMM_HOOK = "comm-hook"
DDP = "torch-ddp"
DEVICE_MOVE = "device-move"
PYTHON_NUMBER = "python-number"
CHECKPOINT = "checkpoint-rng"


class Rule(NamedTuple):
    kind: str
    message: str
    remedy: str


def _reads(what: str, remedy: str) -> Rule:
    return Rule(HOST_SYNC, f"{what} makes the host wait for the device and read a value.", remedy)


_STAY = "keep the value in a tensor, and read it after a replay."
_BRANCH = "choose on the device (torch.where, masks, multiplication by 0 or 1) or outside the step."
_PRINT = "print after a replay, from a tensor that the step fills."

# Methods of tensors that read values on the host. What they call is not reported once more.
READS: dict[Any, Rule] = {
    Tensor.item: _reads(".item()", _STAY),
    Tensor.tolist: _reads(".tolist()", _STAY),
    Tensor.numpy: _reads(".numpy()", _STAY),
    Tensor.__array__: _reads("Turning a tensor into a NumPy array", _STAY),
    Tensor.cpu: _reads(".cpu()", "copy to the host after a replay."),
    Tensor.__bool__: _reads("The truth of a tensor (if, while, and, bool())", _BRANCH),
    Tensor.is_nonzero: _reads(".is_nonzero()", _BRANCH),
    torch.is_nonzero: _reads("torch.is_nonzero", _BRANCH),
    Tensor.__contains__: _reads("`in` on a tensor", _BRANCH),
    Tensor.__float__: _reads("float() of a tensor", _STAY),
    Tensor.__int__: _reads("int() of a tensor", _STAY),
    Tensor.__complex__: _reads("complex() of a tensor", _STAY),
    Tensor.__index__: _reads("A tensor as an index or a count", "index with tensor operations."),
    Tensor.__repr__: _reads("Printing a tensor", _PRINT),
    Tensor.__format__: _reads("Formatting a tensor", _PRINT),
}

_MASK_READ = Rule(
    DATA_DEPENDENT_SHAPE,
    "Indexing by a boolean mask: the number of elements depends on the data.",
    "use torch.where, or multiply by the mask.",
)
MASK_WRITE = Rule(
    DATA_DEPENDENT_SHAPE,
    "Assigning tensor values through a boolean mask: CUDA counts the elements on the host first. "
    "(Assigning a number, x[mask] = 0, is fine.)",
    "use torch.where(mask, values, x), masked_fill_ or masked_scatter_.",
)


def _shape(what: str, remedy: str) -> Rule:
    return Rule(DATA_DEPENDENT_SHAPE, f"{what}: the shape of the result depends on data.", remedy)


_UNIQUE = _shape("torch.unique", "do it outside the step; sort keeps the shape.")
_NONZERO = _shape("nonzero", "use torch.where with three arguments, or nonzero_static.")
_SPARSE = _shape("A sparse tensor", "use dense tensors, sparse=False in embeddings.")

# Operators, by name, that CUDA cannot run without the host.
OPERATORS: dict[str, Rule] = {
    "aten::nonzero": _NONZERO,
    "aten::masked_select": _shape("masked_select", "use torch.where, or multiply by the mask."),
    "aten::_unique": _UNIQUE,
    "aten::_unique2": _UNIQUE,
    "aten::unique_dim": _UNIQUE,
    "aten::unique_consecutive": _UNIQUE,
    "aten::unique_dim_consecutive": _UNIQUE,
    "aten::bincount": _shape("bincount", "use zeros(n).scatter_add_ with a fixed n."),
    "aten::_to_sparse": _SPARSE,
    "aten::_coalesce": _SPARSE,
    "aten::equal": _reads("torch.equal", "compare with (a == b).all(), which stays a tensor."),
    "aten::allclose": _reads("torch.allclose", "compare with isclose(a, b).all()."),
    "aten::_linalg_check_errors": _reads(
        "The error check of a linalg function", "call its _ex form (linalg.inv_ex, cholesky_ex)."
    ),
    "c10d::barrier": (BARRIER := _reads("A barrier", "leave it out of the step.")),
}

MASK_INDEX = {torch.bool, torch.uint8}


def judge_operator(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Rule | None:
    """What a call of an operator means for a capture.

    `_local_scalar_dense`, by which values are read, depends on who calls it and is not judged here.
    """
    name = func._schema.name
    if name == "aten::index":
        return _MASK_READ if _has_mask(args[1]) else None
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return MASK_WRITE if _has_mask(args[1]) else None
    if name == "aten::repeat_interleave":
        # The form with a number of repeats never gets here.
        size = kwargs.get("output_size")
        remedy = "pass output_size=."
        return _shape("repeat_interleave with a tensor", remedy) if size is None else None
    if name == "aten::multinomial":
        replacement = kwargs.get("replacement", args[2] if len(args) > 2 else False)
        if replacement and args[1] != 1:
            return None
        return _reads(
            "torch.multinomial",
            "sample by argmax of probabilities / torch.empty_like().exponential_().",
        )
    return OPERATORS.get(name)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in MASK_INDEX for index in indices)


# Functions that make tensors where they are told to, on the CPU if they are not told.
FACTORIES: set[Any] = {
    getattr(torch, name)
    for name in (
        "arange empty eye full linspace logspace normal ones rand randint randn randperm "
        "scalar_tensor tril_indices triu_indices zeros"
    ).split()
}
# Those that copy from Python objects, wherever the tensor goes.
FROM_PYTHON: set[Any] = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}

CPU_MADE = Rule(
    CPU_TENSOR,
    "A tensor is made on the CPU in the step: every replay sees the values of the capture.",
    "make it before the step, or on the device by a kernel (torch.arange(n, device=x.device)).",
)
COPIED_IN = Rule(
    HOST_COPY,
    "Values go from Python to the device: a copy from pageable memory, which CUDA refuses to "
    "capture.",
    "make the tensor once, outside the step; for constants use torch.full((), value, device=...).",
)
LIST_INDEX = Rule(
    HOST_COPY,
    "Indexing by a Python list copies the list to the device.",
    "make the index tensor once, outside the step.",
)
MOVED_ARGUMENT = Rule(
    DEVICE_MOVE,
    "An argument of the step is moved to a device. If it is on the host when the step runs on a "
    "GPU, the copy cannot be captured.",
    "move batches to the device outside the step.",
)
MOVED_TO_CPU = _reads('.to("cpu")', "copy to the host after a replay.")

# What parts of torch do for the user.
BY_CLIPPING = Rule(
    HOST_SYNC,
    "clip_grad_norm_ with error_if_nonfinite=True reads the norm on the host.",
    "leave error_if_nonfinite out, and look at the returned norm after a replay.",
)
BY_SCALER = Rule(
    GRAD_SCALER,
    "GradScaler.step() reads on the host whether gradients are finite, unless the optimizer does "
    "that itself.",
    "construct the optimizer with fused=True (and capturable=True where it has that).",
)
BY_DISABLED_SCALER = Rule(
    GRAD_SCALER,
    "This GradScaler is for CUDA and disabled here. Where it is enabled, its step() reads on the "
    "host whether gradients are finite.",
    "construct the optimizer with fused=True (and capturable=True where it has that).",
)
BY_OBJECTS = Rule(
    HOST_SYNC,
    "A collective of Python objects pickles them and waits for the device.",
    "use collectives of tensors in the step.",
)
BY_CHECKPOINT = Rule(
    CHECKPOINT,
    "Checkpointing keeps the state of the random number generator, which CUDA may refuse to give "
    "during a capture.",
    "pass preserve_rng_state=False if nothing random runs in the checkpointed part.",
)
BY_TORCH_DDP = Rule(
    DDP,
    "torch's DDP takes part: its reducer needs 11 warm-up steps on a side stream before a capture "
    "and cannot be watched from here.",
    "use fusedddp.wrap, or see the notes on DDP in torch's page on CUDA graphs.",
)


# -- optimizers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerNeeds:
    """What an optimizer class needs in order to be captured.

    Attributes:
        flags: what each of its parameter groups must have; None if nothing helps.
        tensor_lr: with which flags a tensor as the learning rate is not read on the host; None if
            it always is.
    """

    flags: dict[str, bool] | None
    tensor_lr: dict[str, bool] | None = None


_CAPTURABLE = {"capturable": True}

# foreach=None picks foreach for CUDA parameters, so only an explicit False is another form.
OPTIMIZERS: dict[type[Optimizer], OptimizerNeeds] = {
    optim.Adam: OptimizerNeeds(_CAPTURABLE, {}),
    optim.AdamW: OptimizerNeeds(_CAPTURABLE, {}),
    optim.NAdam: OptimizerNeeds(_CAPTURABLE, {}),
    optim.RAdam: OptimizerNeeds(_CAPTURABLE, {}),
    optim.Adamax: OptimizerNeeds(_CAPTURABLE, {}),
    optim.ASGD: OptimizerNeeds(_CAPTURABLE, {}),
    optim.Rprop: OptimizerNeeds(_CAPTURABLE, {}),
    optim.RMSprop: OptimizerNeeds(_CAPTURABLE, {"foreach": True}),
    optim.Adadelta: OptimizerNeeds(_CAPTURABLE, {"foreach": True}),
    optim.SGD: OptimizerNeeds({}, {"fused": True}),
    optim.Adagrad: OptimizerNeeds({"fused": True}, {"fused": True}),
    optim.Adafactor: OptimizerNeeds(None),
    optim.LBFGS: OptimizerNeeds(None),
    optim.SparseAdam: OptimizerNeeds(None),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS[optim.Muon] = OptimizerNeeds({})


def needs_of(optimizer: Optimizer) -> OptimizerNeeds | None:
    """What is known of an optimizer; None if its step is not one of torch's own."""
    for cls in type(optimizer).__mro__:
        if cls in OPTIMIZERS:
            return OPTIMIZERS[cls]
        if "step" in vars(cls):
            return None
    return None


def judge_optimizer(optimizer: Optimizer) -> list[tuple[bool, Rule]]:
    """What its classes and flags say of an optimizer: (whether it is decided, what) each."""
    name = type(optimizer).__name__
    needs = needs_of(optimizer)
    if needs is None:
        unknown = Rule(
            OPTIMIZER,
            f"{name} has a step of its own, whose form on a GPU cannot be told from here.",
            "see that its step reads no value on the host and keeps its step count on the device.",
        )
        return [(False, unknown)]
    found: list[tuple[bool, Rule]] = []
    flags = needs.flags
    if flags is None:
        message = f"{name} reads values on the host in its step, whatever its settings."
        found.append((True, Rule(OPTIMIZER, message, "use AdamW with capturable=True, or SGD.")))
    elif any(not _has(group, flags) for group in optimizer.param_groups):
        say = ", ".join(f"{key}={value}" for key, value in flags.items())
        if flags is _CAPTURABLE and any(g.get("fused") for g in optimizer.param_groups):
            say = f"fused=True, {say}"
        message = f"{name} without {say} keeps its step count on the host, or reads it there."
        found.append((True, Rule(OPTIMIZER, message, f"construct it with {say}.")))
    if any(
        p.grad is not None and p.grad.is_sparse for g in optimizer.param_groups for p in g["params"]
    ):
        found.append((True, _SPARSE))
    found += [(True, rule) for rule in _judge_lr(optimizer, needs, name)]
    return found


def _judge_lr(optimizer: Optimizer, needs: OptimizerNeeds, name: str) -> list[Rule]:
    groups = optimizer.param_groups
    rate, form = "lr=torch.tensor(lr, device=...)", needs.tensor_lr
    say = ", ".join([rate, *(f"{key}={value}" for key, value in (form or {}).items())])
    if any(not isinstance(group["lr"], Tensor) for group in groups) and _is_scheduled(optimizer):
        if isinstance(optimizer, optim.Rprop):  # reads lr when it makes its state, never again
            return []
        remedy = (
            f"construct {name} with {say}."
            if form is not None
            else ("use one that takes a tensor as lr, AdamW with capturable=True for example.")
        )
        message = (
            f"A scheduler changes the learning rate of {name}, which is a Python float: every "
            "replay repeats the value of the capture."
        )
        return [Rule(FROZEN_LR, message, remedy)]
    rules = []
    for group in groups:
        lr = group["lr"]
        if not isinstance(lr, Tensor):
            continue
        if needs.flags is not None and (form is None or not _has(group, form)):
            remedy = f"construct it with {say}." if form else "use a float, without a scheduler."
            message = f"{name} reads a tensor as lr on the host in this form."
            rules.append(Rule(OPTIMIZER, message, remedy))
            break
        if lr.is_cpu and any(p.is_cuda for p in group["params"]):
            message = f"The tensor lr of {name} is on the CPU: a replay does not see its changes."
            rules.append(Rule(FROZEN_LR, message, f"construct {name} with {rate}."))
            break
    return rules


def _has(group: dict[str, Any], flags: dict[str, bool]) -> bool:
    for key, value in flags.items():
        found = group.get(key)
        if key == "foreach" and found is None:
            continue
        if bool(found) != value:
            return False
    return True


def _is_scheduled(optimizer: Optimizer) -> bool:
    return hasattr(optimizer.step, "_wrapped_by_lr_sched") or any(
        "initial_lr" in group for group in optimizer.param_groups
    )


# -- communication hooks --------------------------------------------------------------------------

_CAPTURABLE_HOOKS = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"}
_DEFAULT_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


def is_known_comm_hook(hook: Callable[..., Any]) -> bool:
    """Whether a DDP communication hook is known to do nothing but device work."""
    return (
        getattr(hook, "__module__", None) == _DEFAULT_HOOKS
        and getattr(hook, "__name__", None) in _CAPTURABLE_HOOKS
    )

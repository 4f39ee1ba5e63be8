"""Watches a step from all sides at once and notes what stands against capturing it.

No single point of view sees everything. Operators are seen by a dispatch mode, in forward and
backward, but on the CPU not ``.cpu()`` or ``print``; calls of tensor methods are seen by a function
mode; what Python does without tensors, by patches; optimizers and wrapped models, by global hooks.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import threading
import tokenize
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import one_hot
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedddp import capture_rules as rules
from fusedddp.capture_patches import Patches, install
from fusedddp.capture_places import Origin, Places, is_installed
from fusedddp.capture_report import Finding, Place
from fusedddp.capture_rules import Rule
from fusedddp.module import FusedDDP

# Parts of torch whose CPU form says nothing about their CUDA form; they are judged otherwise.
_QUIET = ("optim/", "distributed/", "nn/parallel/")
_AVERAGED_MODELS = "optim/swa_utils.py"  # no optimizers: what they read, they read on CUDA too


class Watch:
    """Everything that one check notes, and what is switched on to note it.

    Args:
        places: finds lines of the user's own code.
        arguments: the tensors among the arguments of the step.
    """

    def __init__(self, places: Places, arguments: Iterable[Tensor]) -> None:
        self._places = places
        self._thread = threading.get_ident()
        self._arguments = {id(tensor) for tensor in arguments}
        self._noted: dict[tuple[str, str, Place], tuple[Finding, bool, bool]] = {}
        # Functions of torch that are running, outermost first: (function, args, kwargs).
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        # Tensors made on the host in the step, and whether they were reported for that.
        self._host_made: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        # Lines that assign a number through a mask; their backward fills with zero.
        self._fills: set[Place] = set()
        self._saw_gpu = False
        self._saw_torch_ddp = False
        self._num_unknown_steps = 0
        self._lowered: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._patches = Patches()
        self._handles: list[Any] = []
        self._modes: list[Any] = []

    # -- on and off ------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        # The dispatch mode imports it at its first operator; that should not be watched.
        import torch._dynamo  # noqa: F401

        try:
            install(self._patches, self._notify)
            self._patch_torch()
            self._handles = [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
                register_module_forward_pre_hook(self._before_module),
            ]
            for mode in (_Functions(self), _Operators(self)):
                mode.__enter__()  # type: ignore[no-untyped-call]
                self._modes.append(mode)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._modes:
            self._modes.pop().__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._patches.restore()
        self._restore_groups()

    def _patch_torch(self) -> None:
        engine = getattr(torch.autograd, "_engine_run_backward", None)
        if engine is not None:

            def run_backward(*args: Any, **kwargs: Any) -> Any:
                if not self._calls:
                    return engine(*args, **kwargs)
                # `loss.backward()` is itself a call that the function mode sees, and it sees none
                # inside of that. Code of the user's runs there: hooks, checkpointed parts.
                calls, self._calls = self._calls, []
                try:
                    with _Functions(self):
                        return engine(*args, **kwargs)
                finally:
                    self._calls = calls

            self._patches.set(torch.autograd, "_engine_run_backward", run_backward)
        get_rng_state, scaler_step = torch.get_rng_state, GradScaler.step

        def noted_rng_state() -> Tensor:
            origin = self._places.origin()
            if origin.passes("utils/checkpoint.py") and not origin.in_backward:
                self._note(rules.BY_CHECKPOINT, origin, decided=False)
            return get_rng_state()

        def noted_step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            fused = getattr(optimizer, "_step_supports_amp_scaling", False)
            off = not scaler.is_enabled() and getattr(scaler, "_device", "") == "cuda"
            if off and not fused and not torch.cuda.is_available():
                self._note(rules.BY_DISABLED_SCALER, self._places.origin(), decided=False)
            return scaler_step(scaler, optimizer, *args, **kwargs)

        self._patches.set(torch, "get_rng_state", noted_rng_state)
        self._patches.set(GradScaler, "step", noted_step)

    # -- what was noted --------------------------------------------------------------------------

    def findings(self) -> tuple[Finding, ...]:
        return tuple(self._select(decided=True))

    def undecided(self) -> tuple[Finding, ...]:
        return tuple(self._select(decided=False))

    def _select(self, *, decided: bool) -> Iterator[Finding]:
        for finding, is_decided, on_cpu in self._noted.values():
            # Where the step runs on a GPU, reading a tensor that is on the CPU waits for nothing.
            if is_decided == decided and not (on_cpu and self._saw_gpu):
                yield finding

    def add(self, rule: Rule, place: Place, *, decided: bool = True, on_cpu: bool = False) -> None:
        """Notes a finding, once for each line."""
        finding = Finding(rule.kind, rule.message, rule.remedy, place)
        self._noted.setdefault((rule.kind, rule.message, place), (finding, decided, on_cpu))

    def _note(
        self, rule: Rule, origin: Origin, *, decided: bool = True, on_cpu: bool = False
    ) -> None:
        """Notes what code of the user's, or of torch on its behalf, does."""
        if origin.is_ours:
            return
        if origin.passes(*_QUIET) and not origin.passes(_AVERAGED_MODELS):
            names = {n for path, n in origin.through if path == "distributed/distributed_c10d.py"}
            if any("object" in name for name in names):
                rule = rules.BY_OBJECTS
            elif rule is not rules.BARRIER or "barrier" not in names:
                return
        elif origin.passes("nn/utils/clip_grad.py"):
            rule = rules.BY_CLIPPING
        elif ("amp/grad_scaler.py", "_maybe_opt_step") in origin.through:
            rule = rules.BY_SCALER
        elif origin.passes("distributions/"):
            rule = rule._replace(remedy="construct the distribution with validate_args=False.")
        place = self._places.blame(origin)
        # The backward of what was reported is not worth another line.
        if origin.in_backward and any(k == rule.kind and p == place for k, _, p in self._noted):
            return
        decided &= not self._num_unknown_steps
        self.add(rule, place, decided=decided, on_cpu=on_cpu)

    def _notify(self, rule: Rule) -> None:
        """For patches: notes what the user's own code calls."""
        if threading.get_ident() == self._thread:
            origin = self._places.origin()
            # Installed packages read the clock for progress bars and logs.
            is_theirs = rule.kind == rules.TIME and is_installed(origin.place)
            if origin.is_direct and not is_theirs and not self._places.is_importing():
                self._note(rule, origin)

    # -- functions of torch ----------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function of torch, and notes what it means for a capture."""
        if (rule := rules.READS.get(func)) is not None:
            tensor = next(iter(tensors_in((args, kwargs))), None)
            if tensor is not None and not self._is_host_made(tensor):
                self._note(rule, self._places.origin(), on_cpu=tensor.is_cpu)
        elif func in (Tensor.to, Tensor.cuda):
            args, kwargs, done = self._move(func, args, kwargs)
            if done:
                return args[0]
        makes = (func in rules.FACTORIES or func in rules.FROM_PYTHON) and "out" not in kwargs
        wanted = kwargs.get("device")
        if makes and wanted is not None and _stands_in(wanted):
            kwargs = {**kwargs, "device": "cpu"}
        self._calls.append((func, args, kwargs))
        try:
            result = func(*args, **kwargs)
        finally:
            self._calls.pop()
        if makes and isinstance(result, Tensor):
            self._made(func, args, kwargs, wanted, result)
        return result

    def _made(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Any, result: Tensor
    ) -> None:
        """Notes where the memory of a new tensor comes from."""
        data = [*(args[1:] if func is Tensor.new_tensor else args), *kwargs.values()]
        origin = self._places.origin()
        if not origin.is_direct or origin.place is None or any(isinstance(a, Tensor) for a in data):
            return
        placed = wanted is not None or func is Tensor.new_tensor or _has_default_device()
        says_cpu = wanted is not None and _says_cpu(origin.place, wanted)
        if placed and not says_cpu:
            if func in rules.FROM_PYTHON:
                self._note(rules.COPIED_IN, origin)
            return
        # A single number is read at the launch of the kernel that takes it, as a constant is.
        is_seen = result.dim() > 0
        if is_seen:
            self._note(rules.CPU_MADE, origin)
        self._host_made[id(result)] = (weakref.ref(result), is_seen)

    def _is_host_made(self, tensor: Any) -> bool:
        reference, _ = self._host_made.get(id(tensor), (None, False))
        return reference is not None and reference() is tensor

    def _move(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """Notes a move to a device; returns what to call it with, and whether it is done."""
        tensor = args[0]
        named = kwargs.get("device", args[1] if len(args) > 1 else None)
        if func is Tensor.cuda:
            named = "cuda"
        if not isinstance(named, (str, torch.device, int)):
            return args, kwargs, False
        device = torch.device(named)
        origin = self._places.origin()
        says_cpu = device.type == "cpu" and (origin.place is None or _says_cpu(origin.place, named))
        if self._is_host_made(tensor):
            if not says_cpu and not self._host_made[id(tensor)][1]:
                self._note(rules.COPIED_IN, origin)
        elif says_cpu:
            self._note(rules.MOVED_TO_CPU, origin, on_cpu=tensor.is_cpu)
        elif id(tensor) in self._arguments and tensor.is_cpu:
            self._note(rules.MOVED_ARGUMENT, origin, decided=False)
        if not _stands_in(device):
            return args, kwargs, False
        if func is Tensor.cuda:
            return args, kwargs, True
        if "device" in kwargs:
            return args, {**kwargs, "device": "cpu"}, False
        return (tensor, "cpu", *args[2:]), kwargs, False

    # -- operators -------------------------------------------------------------------------------

    def saw_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Notes what an operator means for a capture."""
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
            self._places.note_forward()
        if isinstance(result, Tensor) and result.is_cuda:
            self._saw_gpu = True
        call = self._calls[-1][0] if self._calls else None
        if call in rules.READS:
            return
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            self._saw_read(args[0])
        elif name == "aten::lift_fresh":
            self._saw_lift(call, result)
        elif name in ("aten::copy_", "aten::_to_copy"):
            self._saw_copy(args, kwargs, result)
        elif (rule := rules.judge_operator(func, args, kwargs)) is not None:
            origin = self._places.origin()
            if rule is not rules.MASK_WRITE or not self._is_fill(call, origin):
                self._note(rule, origin)

    def _is_fill(self, call: Any, origin: Origin) -> bool:
        """Whether an assignment through a mask becomes a masked fill on CUDA, as of a number."""
        place = self._places.blame(origin)
        if call is Tensor.__setitem__:
            value = self._calls[-1][1][2]
            if not isinstance(value, Tensor) or (self._is_host_made(value) and value.dim() == 0):
                self._fills.add(place)
                return True
            return False
        return origin.in_backward and place in self._fills

    def _saw_read(self, tensor: Tensor) -> None:
        origin = self._places.origin()
        on_cpu = tensor.is_cpu
        if not self._calls:
            # In a backward it is compiled code, whose form on a GPU may be another; of torch's DDP
            # everything was said.
            if not (origin.in_backward and self._saw_torch_ddp):
                rule = _read_rule("An operation of torch")
                self._note(rule, origin, decided=not origin.in_backward, on_cpu=on_cpu)
            return
        func, args, kwargs = self._calls[-1]
        name = getattr(func, "__name__", str(func))
        if func in rules.FROM_PYTHON:
            return  # reported as a copy from the host, or as made there
        if func is one_hot:
            # With a number of classes, the CPU checks values that CUDA does not look at.
            if kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
                self._note(
                    Rule(
                        rules.DATA_DEPENDENT_SHAPE,
                        "one_hot without num_classes: the shape of the result depends on data.",
                        "pass num_classes=.",
                    ),
                    origin,
                    on_cpu=on_cpu,
                )
            return
        if self._is_host_made(tensor):
            return
        if any(tensor is item for item in _flatten((args, kwargs))):
            rule = _read_rule(f"A tensor given to {name} where a number belongs")
            self._note(rule, origin, on_cpu=on_cpu)
        else:
            # In compiled code the CPU may check what CUDA does not; Python code is one for both.
            decided = inspect.isfunction(func)
            self._note(_read_rule(f"{name}"), origin, decided=decided, on_cpu=on_cpu)

    def _saw_lift(self, call: Any, result: Tensor) -> None:
        """Sees data of Python's or NumPy's become a tensor."""
        if result.dim() == 0:
            return
        origin = self._places.origin()
        if call in (Tensor.__getitem__, Tensor.__setitem__):
            self._note(rules.LIST_INDEX, origin)
        elif call is None and origin.is_direct:
            self._note(rules.CPU_MADE, origin)
            self._host_made[id(result)] = (weakref.ref(result), True)

    def _saw_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if source.is_cpu and result.is_cuda:
            if not (non_blocking and source.is_pinned()):
                self._note(rules.COPIED_IN, self._places.origin())
        elif source.is_cuda and result.is_cpu and not self._calls:
            self._note(rules.MOVED_TO_CPU, self._places.origin())

    # -- optimizers and models -------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        place = self._places.blame(self._places.origin())
        for decided, rule in rules.judge_optimizer(optimizer):
            self.add(rule, place, decided=decided)
        self._num_unknown_steps += rules.needs_of(optimizer) is None
        # On the CPU torch refuses capturable=True; without it the same numbers come out.
        for group in optimizer.param_groups:
            on_cpu = any(p.is_cpu for p in group["params"])
            if on_cpu and group.get("capturable") and not group.get("fused"):
                lower: dict[str, Any] = {
                    key: False for key in ("capturable", "foreach") if key in group
                }
                self._lowered.append((group, {key: group[key] for key in lower}))
                group.update(lower)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_unknown_steps -= rules.needs_of(optimizer) is None
        self._restore_groups()

    def _restore_groups(self) -> None:
        while self._lowered:
            group, values = self._lowered.pop()
            group.update(values)

    def _before_module(self, module: torch.nn.Module, _: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        place = self._places.blame(self._places.origin())
        if not isinstance(module, FusedDDP):
            self._saw_torch_ddp = True
            self.add(rules.BY_TORCH_DDP, place, decided=False)
        for hook, _state in module._comm_hooks:
            if not rules.is_known_comm_hook(hook):
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                message = f"The communication hook {name} runs in the backward, and is not known."
                remedy = "see that it reads no value on the host and counts no steps in Python."
                self.add(Rule(rules.COMM_HOOK, message, remedy), place, decided=False)


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._watch.call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._watch.saw_operator(func, args, kwargs or {}, result)
        return result


def _read_rule(what: str) -> Rule:
    return Rule(
        rules.HOST_SYNC,
        f"{what} makes the host wait for the device and read a value.",
        "keep the value on the device, or pass a Python number that never changes.",
    )


def _stands_in(device: Any) -> bool:
    """Whether the CPU stands in for a GPU that this machine does not have."""
    return torch.device(device).type == "cuda" and not torch.cuda.is_available()


# As an argument, not in a comparison.
_CPU_ARGUMENT = re.compile(r"""(?:[(,]|(?<![=!])=)\s*(?:torch\.)?(device\()?\s*["']cpu["']""")


def _says_cpu(place: Place, named: Any) -> bool:
    """Whether the line itself names the CPU; a variable may hold another device elsewhere.

    Args:
        place: the line.
        named: the device that it has come to.
    """
    code = _without_comment(place.source)
    return any(isinstance(named, str) or match.group(1) for match in _CPU_ARGUMENT.finditer(code))


def _without_comment(line: str) -> str:
    # The rest of a statement may be on other lines, so that tokenizing may end in an error.
    with contextlib.suppress(tokenize.TokenError, IndentationError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]]
    return line


def _has_default_device() -> bool:
    return getattr(torch.utils._device, "CURRENT_DEVICE", None) is not None


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        yield from _flatten(list(value.values()))
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [item for item in _flatten(value) if isinstance(item, Tensor)]

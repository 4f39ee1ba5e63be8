"""`FusedDDP`, the wrapper: torch DDP's contract over our own reducer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from fusedddp.checks import (
    check_flags,
    check_module,
    choose_group,
    device_index,
    refuse_what_is_missing,
    require_ops,
)
from fusedddp.config import MIB, Options, bucket_caps, describe_options
from fusedddp.mixed_precision import MixedPrecision, require_mixed_precision
from fusedddp.process_group import require_group
from fusedddp.reducer import Reducer
from fusedddp.replicas import broadcast, describe, fail_together, start_broadcast, verify_same
from fusedddp_kernels import Ops

_T = TypeVar("_T")


def wrap(module: Module, **ddp_keywords: Any) -> FusedDDP:
    """Wraps `module` so that its gradients are averaged over all ranks during backward.

    Takes the keywords of ``torch.nn.parallel.DistributedDataParallel``, with one other default:
    ``gradient_as_bucket_view`` is True; and beyond them `ops`. See `FusedDDP` for each.

    Example::

        torch.distributed.init_process_group("gloo")
        model = fusedddp.wrap(model)
        model(inputs).sum().backward()  # .grad now holds the mean over all ranks
    """
    return FusedDDP(module, **ddp_keywords)


class FusedDDP(DistributedDataParallel):
    """A module whose gradients are averaged over the ranks of a process group during backward.

    Drop-in for ``torch.nn.parallel.DistributedDataParallel``: same keywords, attributes,
    ``state_dict`` keys and results, and ``isinstance(model, DistributedDataParallel)`` holds. None
    of DDP's C++ reducer is used.

    After a backward every parameter's `.grad` holds the mean over ranks. Attributes and methods of
    the inner module are found through the wrapper unless the wrapper has one of that name; a loss
    computed by another method than ``forward`` is reduced all the same.

    Args:
        module: the module, on the device where it trains.
        device_ids: for a module on one GPU, a list of that GPU: inputs are moved there. None
            (default) leaves inputs alone; required for CPU modules and modules on several devices.
        output_device: accepted beside `device_ids`, as in DDP, where it has no effect with one
            process per device.
        dim: kept for DDP's signature; only ``scatter`` and ``gather`` read it.
        broadcast_buffers: deprecated in torch 2.13; False also leaves buffers out of the initial
            broadcast. Use `forward_sync_buffers`.
        init_sync: compare parameters across ranks and broadcast parameters and buffers from rank
            0 now (default). With False the caller answers for equal values.
        process_group: the ranks to average over; None (default) for the default group.
        bucket_cap_mb: gradients travel in buckets of about this many MiB. None (default): 25, and
            on accelerators 1 for the first bucket, so that it leaves early.
        find_unused_parameters: parameters without a gradient are no error (default False). One
            that no rank used keeps the `.grad` it had; one that some rank used is averaged with
            zeros for the others. Found by which gradients arrive; no graph is searched.
        check_reduction: deprecated and without effect, as in DDP.
        gradient_as_bucket_view: `.grad` aliases the bucket after a backward (default True: half
            the memory and copies). ``zero_grad`` in both forms and ``grad.detach_()`` work. With
            False `.grad` is a tensor of its own, at the price of a second copy of all gradients.
        static_graph: the set of used parameters never changes. Unused ones are then no error.
        delay_all_reduce_named_params: not there yet.
        param_to_hook_all_reduce: not there yet.
        mixed_precision: torch's ``torch.nn.parallel.distributed._MixedPrecision``: dtypes of
            parameters and inputs during forward and backward, of gradients on the wire, and of
            buffers. Outside of a step parameters, and always their `.grad`, are in full precision.
        device_mesh: a 1-D mesh instead of `process_group`.
        skip_all_reduce_unused_params: not there yet.
        bucket_cap_mb_list: not there yet.
        batched_grad_copy: accepted; gradients are always copied in batches.
        forward_sync_buffers: rank 0's buffers are given to all ranks (default True): before each
            forward in training mode, which all ranks must be in together, and at the end of each
            backward, so that evaluation on any rank finds them in step without talking to others.
        ops: your own kernels (`fusedddp_kernels.Ops`); None (default) for Triton on GPUs and plain
            torch on CPU. Beyond DDP's keywords. `fusedddp_kernels.testing.check_ops` tests them.

    Raises:
        ValueError, TypeError: a keyword value that means nothing; no process group.
        NotImplementedError: something that is not there yet.
        RuntimeError: no parameter requires a gradient, or ranks differ in number, names, shapes,
            strides or dtypes of parameters. Every rank raises, whichever it concerns.
    """

    reducer: Reducer  # type: ignore[assignment]

    def __init__(
        self,
        module: Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        ops: Ops | None = None,
    ) -> None:
        # The base class would build the C++ reducer; only its name and its pure methods are used.
        Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = choose_group(process_group, device_mesh)
        problem: Exception | None = None
        try:
            refuse_what_is_missing(
                delay_all_reduce_named_params=delay_all_reduce_named_params,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params or None,
                bucket_cap_mb_list=bucket_cap_mb_list or None,
            )
            check_flags(
                broadcast_buffers=broadcast_buffers,
                init_sync=init_sync,
                find_unused_parameters=find_unused_parameters,
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                batched_grad_copy=batched_grad_copy,
                forward_sync_buffers=forward_sync_buffers,
            )
            require_ops(ops)
            require_mixed_precision(mixed_precision)
            param_dtype = mixed_precision and mixed_precision.param_dtype
            cap, first_cap = bucket_caps(bucket_cap_mb)
            options = Options(
                bucket_cap_bytes=cap,
                first_bucket_cap_bytes=first_cap,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                gradient_as_bucket_view=gradient_as_bucket_view,
                ops=ops,
                grad_dtype=param_dtype,
                reduce_dtype=(mixed_precision and mixed_precision.reduce_dtype) or param_dtype,
            )
            check_module(module)
            self._set_ddp_attributes(module, options, dim)
            self.mixed_precision = mixed_precision
            self._set_devices(device_ids, output_device)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        if init_sync:
            fail_together(self.process_group, problem)
        elif problem is not None:
            raise problem
        if device_mesh is not None:
            self.device_mesh = device_mesh
        if check_reduction:
            warnings.warn(
                "check_reduction is deprecated and has no effect: every reduction is completed.",
                FutureWarning,
                stacklevel=3,
            )
        self.batched_grad_copy = batched_grad_copy
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        init_sync_buffers = self._set_buffer_flags(broadcast_buffers, forward_sync_buffers)
        if init_sync:
            keywords = describe_options(options)
            keywords.append(f"sync_buffers={self.forward_sync_buffers}")
            keywords.append(f"mixed_precision={mixed_precision}")
            verify_same(self.process_group, keywords, "keywords of wrap")
            verify_same(
                self.process_group,
                [describe(n, p) for n, p in self._named_replicas()],
                "parameters",
            )
            if self.forward_sync_buffers or init_sync_buffers:
                lines = [
                    f"{n}: {b.dtype}{list(b.shape)}" for n, b in self.named_module_buffers.items()
                ]
                verify_same(self.process_group, lines, "buffers")
            buffers = self.modules_buffers if init_sync_buffers else []
            replicas: list[Tensor] = [p for _, p in self._named_replicas()]
            broadcast([*replicas, *buffers], self.process_group)
        self._build_reducer(options)

    # -- construction ----------------------------------------------------------------------------

    def _set_ddp_attributes(self, module: Module, options: Options, dim: int) -> None:
        """Sets what code written for DDP may read from an instance."""
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module_parameters = [p for _, p in self._named_replicas()]
        if not any(p.requires_grad for p in self._module_parameters):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                f"that requires a gradient: expected one in {type(module).__name__}, found "
                f"{len(self._module_parameters)} parameters, all frozen or ignored. Unfreeze one "
                "before wrapping, or use the module without a wrapper."
            )
        self.dim = dim
        self.logger = None
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self.static_graph = options.static_graph
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.skip_all_reduce_unused_params = False
        self.broadcast_bucket_size = 250 * MIB
        self.bucket_bytes_cap = options.bucket_cap_bytes
        self.bucket_bytes_cap_list = []
        self.bucket_bytes_cap_default = options.first_bucket_cap_bytes < options.bucket_cap_bytes
        self.use_side_stream_for_tensor_copies = True
        self._use_python_reducer = False
        self._delay_all_reduce_params = []
        self._delay_grad_buffer = None
        self._delay_grad_views = []
        self._delay_all_reduce_all_params = False
        self._comm_hooks = []
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._accum_grad_hooks = []
        self._ddp_sink_clone = True

    def _set_devices(
        self,
        device_ids: list[int | torch.device] | None,
        output_device: int | torch.device | None,
    ) -> None:
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                "device_ids can only be None or contain a single element. "
                f"Found {device_ids}. Start one process per device."
            )
        types = {p.device.type for p in self._module_parameters}
        if len(types) != 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but "
                f"input module parameters locate in {types}."
            )
        if "meta" in types:
            raise ValueError(
                "expected parameters with memory, found some on the meta device. Materialise the "
                "module first: module.to_empty(device=...), then initialise its parameters."
            )
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                raise ValueError(
                    "DistributedDataParallel device_ids and output_device arguments only work with "
                    "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                    f"{device_ids}, output_device {output_device}, and module parameters "
                    f"{ {p.device for p in self._module_parameters} }. Leave both out."
                )
            self.device_ids = None
            self.output_device = None
        else:
            self.device_ids = [device_index(device_ids[0])]
            self.output_device = device_index(
                device_ids[0] if output_device is None else output_device
            )

    def _set_buffer_flags(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
    ) -> bool:
        """Sets `forward_sync_buffers`; returns whether buffers take part in the initial sync."""
        if broadcast_buffers is not None:
            ignored = (
                " and is ignored beside forward_sync_buffers"
                if forward_sync_buffers is not None
                else ""
            )
            warnings.warn(
                f"`broadcast_buffers` is deprecated{ignored}. Use `forward_sync_buffers` instead; "
                "unlike broadcast_buffers=False, forward_sync_buffers=False still syncs them at "
                "init.",
                FutureWarning,
                stacklevel=4,
            )
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            return True
        self.forward_sync_buffers = broadcast_buffers is not False
        return self.forward_sync_buffers

    def _build_reducer(self, options: Options) -> None:
        self._precision: MixedPrecision | None = None
        if self.mixed_precision is not None:
            self._precision = MixedPrecision(
                self.mixed_precision, self.module, self.parameters_to_ignore
            )
        trained = [(n, p) for n, p in self._named_replicas() if p.requires_grad]
        frozen = [(n, p) for n, p in self._named_replicas() if not p.requires_grad]
        self.reducer = Reducer(
            trained,
            frozen,
            self.process_group,
            options,
            requires_sync=_weakly(self, lambda wrapper: wrapper.require_backward_grad_sync),
            on_round=_weakly(self, lambda wrapper: wrapper._start_buffer_sync()),
            check_params=_weakly(self, lambda wrapper: wrapper._check_params()),
            precision=self._precision,
        )

    def _check_params(self) -> None:
        """Raises if a parameter of the module is not the one that was wrapped."""
        wrapped = set(map(id, self._module_parameters))
        for name, param in self._named_replicas():
            if id(param) not in wrapped:
                raise RuntimeError(
                    f"expected the parameters that were wrapped, found another one as {name}: its "
                    "gradient would not be averaged. Wrap the module again after replacing "
                    "parameters (load_state_dict(assign=True) replaces all)."
                )

    def _named_replicas(self) -> Iterator[tuple[str, Parameter]]:
        for name, param in self.module.named_parameters():
            if name not in self.parameters_to_ignore:
                yield name, param

    # -- training --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; with gradients enabled, prepares the backward through its outputs."""
        with torch.autograd.profiler.record_function("FusedDDP.forward"):
            trains = torch.is_grad_enabled()
            if trains:
                self.reducer.prepare_for_forward(sync=self.require_backward_grad_sync)
                # Neither evaluation nor a forward without gradients may wait for other ranks.
                if self.training and self.will_sync_module_buffers() and not _inside_backward():
                    self._sync_buffers()
            else:
                self.reducer.restore_abandoned()
            if self.device_ids:
                moved_inputs, moved_kwargs = self.to_kwargs(  # type: ignore[no-untyped-call]
                    inputs, kwargs, self.device_ids[0]
                )
                inputs, kwargs = moved_inputs[0], moved_kwargs[0]
            lowered: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._precision is not None:
                inputs, kwargs = self._precision.cast_inputs(inputs, kwargs)
                lowered = self._precision.lowered(keep=trains)
            with self._inside_ddp_forward(), lowered:
                output = self.module(*inputs, **kwargs)
            if trains:
                self.require_forward_param_sync = self.require_backward_grad_sync
                self.reducer.prepare_for_backward(
                    _find_tensors(output), sync=self.require_backward_grad_sync
                )
            return output

    def will_sync_module_buffers(self) -> bool:
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self.modules_buffers) > 0
        )

    @property
    def broadcast_buffers(self) -> bool:
        """The name of `forward_sync_buffers` before torch 2.13."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _sync_buffers(self) -> None:
        self._start_buffer_sync()()

    def _start_buffer_sync(self) -> Callable[[], None]:
        """Starts the broadcast of rank 0's buffers; returns what is to be called to finish it."""
        if not self.will_sync_module_buffers():
            return lambda: None
        # Again each time, because modules may put another tensor in a buffer's place.
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        return start_broadcast(self.modules_buffers, self.process_group)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self.static_graph = True
        self.reducer.options = dataclasses.replace(self.reducer.options, static_graph=True)

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finalized()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    # -- copies ----------------------------------------------------------------------------------

    def _local_state(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("process_group", "reducer", "device_mesh", "_precision"):
            state.pop(name, None)
        # Rebuilt from the module, so that copies do not share tensors with the original.
        for name in ("_module_parameters", "modules_buffers", "named_module_buffers"):
            state.pop(name, None)
        state["_options"] = self.reducer.options
        return state

    def _restore(self, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        state = dict(state)
        options = state.pop("_options")
        Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.process_group = group
        self._module_parameters = [p for _, p in self._named_replicas()]
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self._build_reducer(options)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedDDP:
        """A copy over the same process group; its module is copied, gradients are not."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self._precision.restored() if self._precision else contextlib.nullcontext():
            state = copy.deepcopy(self._local_state(), memo)
        twin._restore(state, self.process_group)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. Pickle model.module or save model.state_dict() instead, and wrap "
                "again."
            )
        if self._precision is not None:
            self._precision.restore()
        return self._local_state()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._restore(state, require_group(None, "unpickling a FusedDDP"))

    # -- access to the inner module --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None:
                raise
        try:
            return getattr(inner, name)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__} nor the {type(inner).__name__} in it has an "
                f"attribute {name!r}"
            ) from None


def _not_there_yet(name: str, instead: str) -> Any:
    def method(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"FusedDDP.{name} is not there yet. {instead}")

    method.__name__ = name
    return method


for _name, _instead in {
    "join": "Give every rank the same number of batches, or drop the last ones.",
    "join_hook": "Give every rank the same number of batches, or drop the last ones.",
    "register_comm_hook": "Leave it out; all_reduce_gradients has a reduce_dtype.",
    "_register_builtin_comm_hook": "Leave the hook out.",
    "_register_buffer_comm_hook": "Buffers are broadcast from rank 0.",
    "_register_fused_optim": "Call optimizer.step() after backward.",
    "_get_ddp_logging_data": "The bucket plan is in model.reducer.layout.",
    "_set_ddp_runtime_logging_sample_rate": "Use torch.profiler.",
    "_set_sparse_metadata": "Use dense embeddings.",
    "_update_process_group": "Wrap model.module again over the new group.",
}.items():
    setattr(FusedDDP, _name, _not_there_yet(_name, _instead))


def _weakly(wrapper: FusedDDP, method: Callable[[FusedDDP], _T]) -> Callable[[], _T]:
    """`method` of `wrapper` without a reference cycle: it dies, with hooks and buckets, at once."""
    reference = weakref.ref(wrapper)

    def call() -> _T:
        alive = reference()
        assert alive is not None  # it holds the reducer, which is what calls
        return method(alive)

    return call


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _find_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned; other objects are not looked into."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _find_tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _find_tensors(item)
    elif dataclasses.is_dataclass(output) and not inspect.isclass(output):
        for field in dataclasses.fields(output):
            yield from _find_tensors(getattr(output, field.name))

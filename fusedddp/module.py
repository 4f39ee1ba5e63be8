"""`FusedDDP`, the wrapper: torch DDP's contract over our own reducer."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from fusedddp.capturing import is_capturing
from fusedddp.checks import (
    check_delayed,
    check_flags,
    check_module,
    choose_devices,
    choose_group,
    refuse_two_reducers,
    require_ops,
)
from fusedddp.comm_hooks import CommHook, CommHookFn, builtin_comm_hook
from fusedddp.config import MIB, Options, bucket_caps, describe_options
from fusedddp.dynamo import keep_dynamo_out
from fusedddp.join import MirrorSteps, begin_step, tell_sync
from fusedddp.logging_data import ErrorLog
from fusedddp.mixed_precision import MixedPrecision, require_mixed_precision
from fusedddp.optimizers import step_in_backward, take_over_in_backward
from fusedddp.output_hooks import find_tensors
from fusedddp.owners import Owners
from fusedddp.process_group import require_group
from fusedddp.reducer import Issue, Reducer
from fusedddp.replicas import broadcast, describe, fail_together, start_broadcast, verify_same
from fusedddp.sparse import sparse_params
from fusedddp.surface import Surface
from fusedddp_kernels import Ops

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_P = ParamSpec("_P")


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


class FusedDDP(Surface):
    """A module whose gradients are averaged over the ranks of a process group during backward.

    Drop-in for ``torch.nn.parallel.DistributedDataParallel``: same keywords, attributes,
    ``state_dict`` keys and results, and ``isinstance(model, DistributedDataParallel)`` holds. None
    of DDP's C++ reducer is used.

    After a backward every parameter's `.grad` holds the mean over ranks: a sparse COO tensor for
    the weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``. Attributes and
    methods of the inner module are found through the wrapper unless the wrapper has one of that
    name; a loss computed by another method than ``forward`` is reduced all the same.

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
            0 now (default). With False the caller answers for equal models, keywords and values.
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
        delay_all_reduce_named_params: accepted with a warning. Names and parameters that torch DDP
            reduces together, at a time of their own; here they travel in buckets with all others.
            The gradients after the backward are the same.
        param_to_hook_all_reduce: when torch DDP reduces those; comes with the keyword above.
        mixed_precision: torch's ``torch.nn.parallel.distributed._MixedPrecision``: dtypes of
            parameters and inputs during forward and backward, of gradients on the wire, and of
            buffers. Outside of a step parameters, and always their `.grad`, are in full precision.
        device_mesh: a 1-D mesh instead of `process_group`.
        skip_all_reduce_unused_params: accepted with a warning; every bucket is reduced.
        bucket_cap_mb_list: caps in MiB, one per bucket in the order in which gradients arrive; the
            last is for all others, too. Goes before `bucket_cap_mb`.
        batched_grad_copy: accepted; gradients are always copied in batches.
        forward_sync_buffers: rank 0's buffers are given to all ranks (default True): before each
            forward in training mode, which all ranks must be in together, and at the end of each
            backward, so that evaluation on any rank finds them in step without talking to others.
        ops: your own kernels (`fusedddp_kernels.Ops`); None (default) for Triton on GPUs and plain
            torch on CPU. Beyond DDP's keywords. `fusedddp_kernels.testing.check_ops` tests them.

    Raises:
        ValueError, TypeError: a keyword value that means nothing; no process group.
        NotImplementedError: a parameter that is not dense.
        RuntimeError: no parameter requires a gradient, or ranks differ in number, names, shapes,
            strides or dtypes of parameters. Every rank raises, whichever it concerns.
    """

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
            check_flags(
                broadcast_buffers=broadcast_buffers,
                init_sync=init_sync,
                find_unused_parameters=find_unused_parameters,
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                batched_grad_copy=batched_grad_copy,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                forward_sync_buffers=forward_sync_buffers,
            )
            require_ops(ops)
            require_mixed_precision(mixed_precision)
            param_dtype = mixed_precision and mixed_precision.param_dtype
            check_module(module)
            cap, leading_caps = bucket_caps(
                bucket_cap_mb,
                bucket_cap_mb_list,
                on_cpu=all(param.device.type == "cpu" for param in module.parameters()),
            )
            options = Options(
                bucket_cap_bytes=cap,
                leading_caps_bytes=leading_caps,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                gradient_as_bucket_view=gradient_as_bucket_view,
                ops=ops,
                grad_dtype=param_dtype,
                reduce_dtype=(mixed_precision and mixed_precision.reduce_dtype) or param_dtype,
            )
            check_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
            self._set_ddp_attributes(module, options, dim)
            self._delay_all_reduce_params = [p for _, p in delay_all_reduce_named_params or ()]
            self.bucket_bytes_cap_list = [int(c * MIB) for c in bucket_cap_mb_list or ()]
            self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
            self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
            self.mixed_precision = mixed_precision
            self.device_ids, self.output_device = choose_devices(
                device_ids, output_device, self._module_parameters
            )
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        if init_sync:
            fail_together(self.process_group, problem)
        elif problem is not None:
            raise problem
        if device_mesh is not None:
            self.device_mesh = device_mesh
        if delay_all_reduce_named_params:
            warnings.warn(
                "delay_all_reduce_named_params has no effect on when gradients are reduced: they "
                "travel with all others, and are the same after the backward.",
                stacklevel=3,
            )
        if skip_all_reduce_unused_params:
            warnings.warn(
                "skip_all_reduce_unused_params has no effect on what is reduced: every bucket is, "
                "so that ranks need not agree first. Unused parameters keep their gradient.",
                stacklevel=3,
            )
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
            sparse = sparse_params(module)
            verify_same(
                self.process_group,
                [describe(n, p, is_sparse=id(p) in sparse) for n, p in self._named_replicas()],
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
        for inner in module.modules():
            _refuse_ddp(inner, self._module_parameters)
        self.dim = dim
        self.logger = ErrorLog()
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self.static_graph = options.static_graph
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * MIB
        self.bucket_bytes_cap = max(options.bucket_cap_bytes, *options.leading_caps_bytes, 0)
        self.use_side_stream_for_tensor_copies = True
        self._use_python_reducer = False
        self._delay_grad_buffer = None
        self._delay_grad_views = []
        self._delay_all_reduce_all_params = False
        self._comm_hooks = []
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._accum_grad_hooks = []
        self._ddp_sink_clone = True
        self._precision: MixedPrecision | None = None
        # Beyond those of the base class.
        self._divide_by_initial_world_size = True
        self._buffer_source = 0
        self.num_buffer_syncs = 0
        self._buffer_futures: list[torch.futures.Future[Any]] = []
        self._optimized_in_backward: list[Parameter] = []

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

    def _build_reducer(self, options: Options, comm_hook: CommHook | None = None) -> None:
        keep_dynamo_out()
        if self.mixed_precision is not None and self._precision is None:
            self._precision = MixedPrecision(
                self.mixed_precision, self.module, self.parameters_to_ignore
            )
        trained = [(n, p) for n, p in self._named_replicas() if p.requires_grad]
        frozen = [(n, p) for n, p in self._named_replicas() if not p.requires_grad]
        sparse = sparse_params(self.module)
        owners = Owners(
            self.module, [p for _, p in trained], self._module_parameters, self.parameters_to_ignore
        )
        self.reducer = Reducer(
            trained,
            frozen,
            self.process_group,
            options,
            requires_sync=_make_requires_sync(self),
            on_launched=_weakly(self, lambda wrapper: wrapper._start_buffer_sync()),
            on_reduced=_weakly(self, lambda wrapper: wrapper._finish_backward()),
            check_params=owners.check,
            comm_hook=comm_hook,
            sparse=[i for i, (_, p) in enumerate(trained) if id(p) in sparse],
            precision=self._precision,
        )

    def renew_if_outdated(self) -> None:
        """Lays the buckets out anew for a module that was frozen, unfrozen or moved.

        Collective if it was; that is up to the user to do on all ranks.

        Raises:
            RuntimeError: on all ranks that come here, if they changed differently.
        """
        if not self.reducer.is_outdated():
            return
        if is_capturing():
            raise RuntimeError(
                "expected the parameters that require a gradient, and their device, to be those of "
                "the last eager step, found others. Run a step eagerly after freezing, unfreezing "
                "or moving parameters, before you capture."
            )
        trained = [n for n, p in self._named_replicas() if p.requires_grad]
        verify_same(self.process_group, trained, "parameters that require a gradient")
        if not trained:  # until some are unfrozen there is nothing to reduce
            return
        old = self.reducer
        old.remove_hooks()
        self._build_reducer(old.rounds.options, old.rounds.comm_hook)
        self.reducer.take_over(old)
        self.reducer.rounds.collective.divide_factor = old.rounds.collective.divide_factor
        self.device = self._module_parameters[0].device

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
                self._log_errors_of(self._prepare_forward)
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
                if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
                    self._share_buffers()
                self.require_forward_param_sync = self.require_backward_grad_sync
                self.reducer.prepare_for_backward(
                    find_tensors(output), sync=self.require_backward_grad_sync
                )
            return output

    def _prepare_forward(self) -> None:
        sync = self.require_backward_grad_sync
        if not self._lazy_init_ran:
            # Only now, because users may add optimizers after wrapping.
            self._optimized_in_backward = take_over_in_backward(self._module_parameters)
            outer = self._get_active_ddp_module()  # type: ignore[no-untyped-call]
            _refuse_ddp(outer, self._module_parameters)
            self._lazy_init_ran = True
        if _inside_backward():  # a forward that activation checkpointing runs again
            return
        self.reducer.prepare_for_forward(sync=sync)
        joins = self._join_config.enable
        if joins:
            begin_step(self)
        self.renew_if_outdated()
        # Neither evaluation nor a forward without gradients may wait for other ranks.
        if (self.training or joins) and self._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            self._share_buffers()
        if joins:
            tell_sync(self)
        self.reducer.pending_forward = sync

    def _share_buffers(self) -> None:
        """Gives all ranks the buffers of one. Collective, but for a step that is rehearsed."""
        if self.reducer.rehearsal is not None:
            self.reducer.rehearsal(Issue.BUFFERS)
            return
        self.num_buffer_syncs += 1
        self._sync_buffers()  # type: ignore[no-untyped-call]

    def issue(self, what: Issue) -> None:
        """Takes part in what other ranks issue in a forward or backward that this one lacks."""
        if what is Issue.BUFFERS:
            self._share_buffers()
        else:
            self.require_forward_param_sync = True  # as after the forward of that backward
            self.reducer.skip_round()

    def _finish_backward(self) -> None:
        for future in self._buffer_futures:
            future.wait()
        self._buffer_futures = []
        step_in_backward(self._optimized_in_backward)

    def skip_backward(self) -> None:
        """Takes the place of the backward on a rank that has none to run. Collective.

        For a batch that one rank has to leave out, because its loss is not finite or its forward
        or backward raised: the rank contributes zeros to the mean and gets the gradients of the
        others, so that all ranks go on with the same step and none waits. Under `no_sync` there is
        nothing to take part in, and nothing is done: what counts is where it is called, and not
        where a forward ran before it.

        One call stands for one backward of the other ranks. Where a step has several (two models,
        say), call it in the order in which their backwards run. It stands for their forward as
        well, if this rank has run none since its last backward: so where a module has buffers, or
        has just been frozen, not for a second backward of one forward.

        Example::

            loss = model(batch).sum()
            if loss.isfinite():
                loss.backward()
            else:
                model.skip_backward()
            optimizer.step()

        Raises:
            RuntimeError: called inside of a backward; or a collective failed.
        """
        if _inside_backward():
            raise RuntimeError(
                "expected a backward to be skipped before it begins or after it failed, found "
                "skip_backward() inside of one. Let it raise, and call skip_backward() in the "
                "handler of that exception."
            )
        if not self.require_backward_grad_sync:
            return
        # A forward under no_sync is not the one whose backward the others reduce.
        if not self.reducer.pending_forward:
            self._mirror_forward()
        self.reducer.skip_round()

    def _mirror_forward(self) -> None:
        """Does together with the other ranks what their forward does."""
        self.renew_if_outdated()
        if self._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            self._share_buffers()
        self.require_forward_param_sync = True

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Gives all ranks the buffers of one; or calls the hook for buffers, if there is one."""
        if not hasattr(self, "buffer_hook"):
            self._buffer_source = authoritative_rank
            start_broadcast(self.modules_buffers, self.process_group, authoritative_rank)()
            return
        hook = self.buffer_hook
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        self._buffer_futures += futures or []

    def _start_buffer_sync(self) -> Callable[[], None]:
        """Starts the broadcast at the end of a backward; returns what finishes it."""
        if not self.will_sync_module_buffers() or hasattr(self, "buffer_hook"):  # type: ignore[no-untyped-call]
            return lambda: None
        # Again each time, because modules may put another tensor in a buffer's place.
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        return start_broadcast(self.modules_buffers, self.process_group, self._buffer_source)

    # -- hooks and groups ------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: CommHookFn) -> None:
        """Reduces by a communication hook in place of the all-reduce. Call it on every rank.

        Args:
            state: passed to `hook` each time.
            hook: called as ``hook(state, bucket)`` once per bucket, in the same order on all ranks,
                when the gradients of the bucket are there; returns a future that holds one tensor
                with the reduced values. `bucket` is a `fusedddp.comm_hooks.GradBucket`, with the
                methods of ``torch.distributed.GradBucket``; its buffer is not divided by the number
                of ranks, nor is the result. The hooks of
                ``torch.distributed.algorithms.ddp_comm_hooks`` can be used as they are.

        Raises:
            TypeError, ValueError: `hook` cannot be one.
            RuntimeError: there is a hook already, or a backward is under way.
        """
        self._log_errors_of(lambda: self.reducer.set_comm_hook(CommHook(state, hook)))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self._log_errors_of(
            lambda: self.reducer.set_comm_hook(
                builtin_comm_hook(comm_hook_type, self.process_group)
            )
        )

    def join_hook(self, **kwargs: Any) -> MirrorSteps:
        """What `join` calls on a rank that ran out of data.

        Args:
            divide_by_initial_world_size: a mean divides by the number of all ranks (default), not
                by that of the ranks that still have data.
        """
        return MirrorSteps(
            self,
            divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True),
        )

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over other ranks from the next backward on. A comm hook has to see to itself."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            return
        self.reducer.check_finalized()
        self.process_group = require_group(new_process_group, "_update_process_group")
        old = self.reducer
        old.remove_hooks()
        self._build_reducer(old.rounds.options, old.rounds.comm_hook)
        self.reducer.take_over(old)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self._log_errors_of(self.reducer.rounds.set_static_graph)
        self.static_graph = True

    # -- copies ----------------------------------------------------------------------------------

    def _local_state(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("process_group", "reducer", "device_mesh", "_precision"):
            state.pop(name, None)
        # Rebuilt from the module, so that copies do not share tensors with the original.
        for name in (
            "_module_parameters",
            "modules_buffers",
            "named_module_buffers",
            "_optimized_in_backward",
        ):
            state.pop(name, None)
        state["_lazy_init_ran"] = False
        state["_comm_hooks"] = []  # their state belongs to the original
        state["require_backward_grad_sync"] = True  # a copy made under no_sync would never sync
        state["_options"] = self.reducer.rounds.options
        return state

    def _restore(self, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        state = {"_precision": None, **state}
        options = state.pop("_options")
        Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.process_group = group
        self._module_parameters = [p for _, p in self._named_replicas()]
        self._optimized_in_backward = []
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self._build_reducer(options)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedDDP:
        """A copy over the same process group; its module is copied.

        Gradients are not, nor are communication hooks, which is logged: their state may belong to
        the gradients of the original.
        """
        if self.reducer.rounds.comm_hook is not None:
            logger.warning(
                "The copy of a FusedDDP has no communication hook: call register_comm_hook on it "
                "to reduce by one."
            )
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


def _make_requires_sync(wrapper: FusedDDP) -> Callable[[], bool]:
    reference = weakref.ref(wrapper)

    def requires_sync() -> bool:
        alive = reference()
        # Its reducer may outlive it in the traceback of an error that somebody holds.
        return alive is not None and alive.require_backward_grad_sync

    return requires_sync


def _weakly(wrapper: FusedDDP, method: Callable[Concatenate[FusedDDP, _P], _T]) -> Callable[_P, _T]:
    """`method` of `wrapper` without a reference cycle: it dies, with hooks and buckets, at once."""
    reference = weakref.ref(wrapper)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        alive = reference()
        assert alive is not None  # it holds the reducer, which is what calls
        return method(alive, *args, **kwargs)

    return call


def _refuse_ddp(other: Module | None, params: Sequence[Parameter]) -> None:
    """Refuses torch's DDP around or inside of ours. (Of two of ours one averages an average.)"""
    if isinstance(other, DistributedDataParallel) and not isinstance(other, FusedDDP):
        refuse_two_reducers(other, params)


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1

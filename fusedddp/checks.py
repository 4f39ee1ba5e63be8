"""Checks of the wrapper's arguments, each with an error that says what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from fusedddp.process_group import require_group


def choose_group(
    process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    if device_mesh is None:
        return require_group(process_group, "fusedddp.wrap")
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments. "
            f"Found {process_group} and {device_mesh}; leave one of them out."
        )
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            "device_mesh: expected a torch.distributed.device_mesh.DeviceMesh, found "
            f"{type(device_mesh).__name__}"
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, but got {device_mesh}. Pass the dimension to "
            "average over, such as mesh['dp']."
        )
    return device_mesh.get_group(mesh_dim=0)


def check_delayed(
    module: Module,
    named_params: Sequence[tuple[str, Parameter]] | None,
    param_to_hook: Parameter | None,
) -> None:
    """Checks the two keywords of torch DDP for reductions at a time of their own."""
    if not named_params and param_to_hook is None:
        return
    if not named_params or param_to_hook is None:
        raise ValueError(
            "param_to_hook_all_reduce and delay_all_reduce_named_params: expected both or none, "
            f"found {param_to_hook!r:.40} and {named_params!r:.40}. Leave both out to reduce "
            "gradients in the order in which they arrive."
        )
    own = set(map(id, module.parameters()))
    pairs = [("param_to_hook_all_reduce", param_to_hook)]
    for pair in named_params:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                "delay_all_reduce_named_params: expected pairs of a name and a parameter, found "
                f"{pair!r:.40} ({type(pair).__name__})"
            )
        pairs.append(pair)
    for name, param in pairs:
        if id(param) not in own:
            raise ValueError(
                f"delay_all_reduce_named_params: expected parameters of the module, found {name}, "
                "which is none of them"
            )


def check_flags(**flags: Any) -> None:
    may_be_none = ("broadcast_buffers", "forward_sync_buffers")
    for name, value in flags.items():
        if not isinstance(value, bool) and not (value is None and name in may_be_none):
            raise TypeError(
                f"{name}: expected True or False, found {value!r} ({type(value).__name__})"
            )


def require_ops(ops: object) -> None:
    if isinstance(ops, type):
        raise TypeError(f"ops: expected an object, found the class {ops.__name__}; call it first")
    missing = [
        name
        for name in ("flatten", "unflatten", "scale_", "grad_stats")
        if ops is not None and not callable(getattr(ops, name, None))
    ]
    if missing:
        raise TypeError(
            "ops: expected an object with the functions of fusedddp_kernels.Ops, found "
            f"{type(ops).__name__} without {', '.join(missing)}"
        )


def check_module(module: Module) -> None:
    if not isinstance(module, Module):
        raise TypeError(f"module: expected a torch.nn.Module, found {type(module).__name__}")
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, param in module.named_parameters():
        if name in ignored:
            continue
        if isinstance(param, UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly "
                f"initialize the modules. Found: {name}"
            )
        if param.layout != torch.strided:
            raise NotImplementedError(f"expected dense parameters, found {param.layout} for {name}")


def choose_devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    params: Sequence[Parameter],
) -> tuple[list[int] | None, int | None]:
    """The index of the one GPU that inputs are moved to, in a list, and that of outputs; or None.

    Raises:
        TypeError: `device_ids` is no list.
        ValueError: several devices, or devices for a module that is not on one GPU.
    """
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError(
            f"device_ids: expected None or a list of one device, found {device_ids!r} "
            f"({type(device_ids).__name__})"
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element. "
            f"Found {device_ids}. Start one process per device."
        )
    types = {param.device.type for param in params}
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
    devices = {param.device for param in params}
    if device_ids and types != {"cpu"} and len(devices) == 1:
        index = _device_index(device_ids[0])
        return [index], index if output_device is None else _device_index(output_device)
    if device_ids or output_device:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
            f"{device_ids}, output_device {output_device}, and module parameters {devices}. "
            "Leave both out."
        )
    return None, None


def _device_index(device: int | torch.device | str) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def refuse_two_reducers(other: DistributedDataParallel, params: Sequence[Parameter]) -> None:
    """Raises RuntimeError if torch's DDP reduces some of `params` too."""
    theirs = {id(p) for p in other._module_parameters if p.requires_grad}
    if not theirs.isdisjoint(map(id, params)):
        raise RuntimeError(
            "expected one reducer for each parameter, found a FusedDDP and torch's "
            f"DistributedDataParallel around {type(other.module).__name__}, one inside of the "
            "other. Each would overwrite the other's buckets: wrap both with fusedddp.wrap, or "
            "leave one out."
        )

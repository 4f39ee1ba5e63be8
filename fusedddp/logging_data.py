"""What ``_get_ddp_logging_data`` says: how a wrapper was built and how it is doing.

The keys are those of torch DDP (c10d's ``logger.cpp``), but for its timings and its order of
gradients, for which torch.profiler is the tool.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fusedddp.module import FusedDDP

# Environment variables that matter to every backend, and their keys in lower case.
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")


class ErrorLog:
    """Remembers the last error of a wrapper; what torch DDP's methods call its logger."""

    def __init__(self) -> None:
        self.error = ""

    def set_error_and_log(self, error: str) -> None:
        self.error = error


def collect(model: FusedDDP) -> dict[str, Any]:
    """Numbers as int, flags as 0 or 1, everything else as text, as torch DDP has it."""
    reducer = model.reducer
    group = model.process_group
    params = reducer.params
    layout = reducer.layout
    dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in params})
    sizes = [] if layout is None else [b.numel * b.dtype.itemsize for b in layout.buckets]
    hook = reducer.rounds.comm_hook
    return {
        "module_name": type(model.module).__name__,
        "world_size": dist.get_world_size(group),
        "rank": dist.get_rank(group),
        "backend_name": dist.get_backend(group),
        "iteration": reducer.rounds.count,
        "has_error": int(bool(model.logger.error)),
        "error": model.logger.error,
        "device_ids": ", ".join(map(str, model.device_ids or ())),
        "output_device": -1 if model.output_device is None else model.output_device,
        "is_multi_device_module": int(model.is_multi_device_module),
        "has_sync_bn": int(
            any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.module.modules())
        ),
        "dtypes": ", ".join(dtypes),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
        "broadcast_buffers": int(model.forward_sync_buffers),
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "static_graph": int(model.static_graph),
        "bucket_cap_bytes": reducer.rounds.options.bucket_cap_bytes,
        **({} if hook is None else {"comm_hook": hook.name}),
        "has_rebuilt_buckets": int(layout is not None),
        "rebuilt_bucket_sizes": ", ".join(map(str, sizes)),
        "rebuilt_per_bucket_param_indices": ", ".join(
            " ".join(map(str, bucket.params)) for bucket in (layout.buckets if layout else ())
        ),
        "num_buckets_reduced": len(sizes),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF"),
        **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
    }

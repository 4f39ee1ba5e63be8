"""The public surface, pinned; and DDP's, covered."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from fusedddp.config import Options
from tests.models import mlp
from tests.ranks import Ranks


def test_exports() -> None:
    assert fusedddp.__all__ == [
        "FusedDDP",
        "__version__",
        "all_reduce_gradients",
        "check_capturable",
        "make_graphed_step",
        "wrap",
    ]
    assert fusedddp.__version__ == version("fusedddp")


def test_keywords_are_ddps() -> None:
    ours = inspect.signature(fusedddp.FusedDDP.__init__).parameters
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    assert list(theirs) == [name for name in ours if name in theirs]
    different = {n for n, p in theirs.items() if ours[n].default != p.default}
    # Before torch 2.13 broadcast_buffers was True instead of None, with the same meaning.
    assert different - {"broadcast_buffers"} == {"gradient_as_bucket_view"}


def test_options() -> None:
    assert [field.name for field in fields(Options)] == [
        "bucket_cap_bytes",
        "leading_caps_bytes",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "ops",
        "grad_dtype",
        "reduce_dtype",
    ]


def check_attributes(rank: int) -> None:
    ours = fusedddp.wrap(mlp())
    theirs = DistributedDataParallel(mlp())
    assert isinstance(ours, DistributedDataParallel)
    # `_bucket_config` is the dataclass behind the attributes that are here by themselves.
    missing = set(vars(theirs)) - set(vars(ours)) - set(dir(type(ours))) - {"_bucket_config"}
    assert not missing, f"DDP sets attributes that FusedDDP does not: {missing}"
    for name, value in vars(theirs).items():
        if isinstance(value, (bool, int, str, type(None))) and name not in (
            "gradient_as_bucket_view",  # views are the default
            "logger",
        ):
            assert getattr(ours, name) == value, name


def test_instances_have_ddps_attributes(two_ranks: Ranks) -> None:
    two_ranks.run(check_attributes)


def test_no_method_of_ddp_reaches_the_cpp_reducer() -> None:
    """Methods of the base class that read its reducer or logger are replaced or refuse."""
    reads = ("self.reducer", "self.logger.", "ddp.reducer", "self.module._")
    unused = {
        # Only called by the constructor and methods that are replaced themselves.
        "__init__", "_ddp_init_helper", "_fire_reducer_autograd_hook", "_root_copy_hook",
        "_module_wait_for_copy_hook", "_setup_in_backward_optimizers", "_pre_forward",
        "_post_forward", "_log_and_throw", "_match_all_reduce_for_bwd_pass",
        "_match_unused_params_allreduce", "_sync_module_buffers", "_lazy_init",
        "_register_accum_grad_hook",
    }  # fmt: skip
    for name, method in vars(DistributedDataParallel).items():
        if not inspect.isfunction(method) or name in unused:
            continue
        if any(text in inspect.getsource(method) for text in reads):
            assert getattr(fusedddp.FusedDDP, name) is not method, f"{name} reads the C++ reducer"


def test_importing_needs_no_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import fusedddp, fusedddp_kernels\n"
        "print(fusedddp.wrap.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "wrap"


def test_kernels_are_importable_without_torch_distributed_state() -> None:
    import fusedddp_kernels

    tensors = [torch.ones(3), torch.ones(2)]
    slots = fusedddp_kernels.Slots(torch.zeros(8), [0, 4], tensors)
    fusedddp_kernels.flatten(tensors, slots)
    assert slots.flat.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]


def test_wrap_is_documented() -> None:
    keywords = list(inspect.signature(DistributedDataParallel.__init__).parameters)[2:]
    for name in keywords:
        assert f"{name}: " in (fusedddp.FusedDDP.__doc__ or ""), f"{name} is not documented"
    assert issubclass(fusedddp.FusedDDP, nn.Module)

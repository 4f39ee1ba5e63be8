"""What torch's DDP has beside training: names of its C++ reducer, logging, the inner module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusedddp.logging_data import ErrorLog, collect
from fusedddp.reducer import Reducer


class Surface(DistributedDataParallel):
    """The part of `FusedDDP` that answers to DDP's names and trains nothing."""

    reducer: Reducer  # type: ignore[assignment]
    logger: ErrorLog

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

    @property
    def broadcast_buffers(self) -> bool:
        """The name of `forward_sync_buffers` before torch 2.13."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # -- logging ---------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return collect(self)  # type: ignore[arg-type]

    def _log_errors_of(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error).__name__}: {error}")
            raise

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted, as torch DDP does: nothing is sampled here, see torch.profiler."""
        if sample_rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, found "
                f"{sample_rate}"
            )

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finalized()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    # -- for the C++ reducer ---------------------------------------------------------------------

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """Accepts the rows that ranks will use, as DDP does, and needs none: any rows will do."""


def _not_supported(name: str) -> Any:
    def method(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"FusedDDP.{name} belongs to the C++ reducer of torch DDP, which FusedDDP has no use "
            "for. docs/compatibility.md says what takes its place."
        )

    method.__name__ = name
    return method


for _name in (
    "_ddp_init_helper",
    "_delayed_all_reduce_hook",
    "_fire_reducer_autograd_hook",
    "_lazy_init",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_module_wait_for_copy_hook",
    "_post_forward",
    "_pre_forward",
    "_register_accum_grad_hook",
    "_register_delay_all_reduce_hook",
    "_root_copy_hook",
    "_setup_in_backward_optimizers",
):
    setattr(Surface, _name, _not_supported(_name))

"""The ops as Triton kernels: one kernel a file. Importing this package needs Triton."""

from fusedddp_kernels.triton_ops.launchers import TritonOps

__all__ = ["TritonOps"]

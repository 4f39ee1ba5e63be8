"""Finds the process group that a call works on, or says which call is missing."""

from __future__ import annotations

import torch.distributed as dist

# Its functions have the default group as a default argument, from when it is imported. Wrapping a
# module imports it, with torch DDP too; were that the first time, the group and its threads would
# outlive destroy_process_group, and a gloo thread that lives can abort Python at its end.
import torch.distributed.nn.functional  # noqa: F401


def require_group(process_group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """`process_group`, or the default one.

    Raises:
        ValueError: there is none, or this rank is not in it.
        TypeError: not a process group.
    """
    if not dist.is_available():
        raise ValueError(f"{caller} needs torch.distributed, which this build of torch lacks")
    if process_group is None:
        if not dist.is_initialized():
            raise ValueError(
                "Default process group has not been initialized. Call "
                "torch.distributed.init_process_group('gloo') (or 'nccl' on GPUs) before "
                f"{caller}, and start the script with torchrun."
            )
        group = dist.group.WORLD
        assert group is not None
        return group
    # torch hands out an int in place of the group on ranks outside of it.
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError(
            f"process_group: expected a group that this rank ({dist.get_rank()}) is a member of, "
            f"found one that it is not in. Call {caller} only on the ranks of the group."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "process_group: expected a torch.distributed.ProcessGroup (see "
            f"torch.distributed.new_group), found {type(process_group).__name__}"
        )
    return process_group

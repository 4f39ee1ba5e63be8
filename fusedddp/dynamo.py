"""What `torch.compile` has to know of this package, and what it cannot do with it."""

from __future__ import annotations

import functools
import sys


@functools.cache
def keep_dynamo_out() -> None:
    """Has dynamo run the code of this package as it is, and compile only what it calls.

    Tracing it fails at the process group, gains nothing, and would guard on the state of the
    reducer, which changes all the time. Decorators for single functions will not do: hooks on
    parameters run inside of a compiled step as well, and one more call for each of them costs.
    """
    # Loaded by DDP's own forward and by every optimizer, but not by `import torch`.
    from torch._dynamo import trace_rules

    trace_rules.add("fusedddp")
    trace_rules.add("fusedddp_kernels")


def refuse_compiled_autograd() -> None:
    """Raises RuntimeError if the running backward is a graph that dynamo compiled."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise RuntimeError(
            "Compiled autograd is not compatible with FusedDDP: expected a backward that autograd "
            "runs, found one that torch.compile does, which would end without reducing. Leave "
            "torch._dynamo.config.compiled_autograd at False; the forward may be compiled."
        )

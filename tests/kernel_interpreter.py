"""Triton's interpreter on CPU, as the kernel tests need it.

`TRITON_INTERPRET=1` has to be set before Triton is imported, and then holds for the whole process.
So these tests run in a process of their own: `tests/test_kernels_interpreted.py` starts it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def faithful_interpreter() -> Iterator[None]:
    """Rounds as a GPU does, and faster.

    The interpreter truncates fp32 to bf16 and is wrong for subnormals, where a GPU, and torch,
    round to nearest even: conversions between the two go through torch here. And it patches the
    language anew at each call of a helper, which takes most of its time: once is enough.
    """
    convert, patch = interpreter._convert_float, interpreter._patch_lang
    scope = patch(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # triton 3.6 asks NumPy for the integer of an array of one element, which 2.4 refuses.
    tl.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())
    interpreter._convert_float = _through_torch(convert)
    interpreter._patch_lang = lambda function: types.SimpleNamespace(restore=lambda: None)
    try:
        with np.errstate(all="ignore"):  # overflow to inf is what is asked for
            yield
    finally:
        interpreter._convert_float, interpreter._patch_lang = convert, patch
        scope.restore()


def _through_torch(convert: Any) -> Any:
    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
            return wide.bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            bits = torch.from_numpy(np.ascontiguousarray(values).view(np.int16))
            return bits.view(torch.bfloat16).float().numpy().view(np.uint32)
        return convert(values, source, target, rounding)

    return converted

"""`check_ops` accepts what is right and finds the smallest input for what is wrong."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from fusedddp_kernels import Ops, reference
from fusedddp_kernels.testing import Case, TensorCase, check_flatten, check_ops


class Broken:
    """The reference, with one op replaced."""

    def __new__(cls, **replaced) -> Ops:
        names = ("flatten", "unflatten", "scale_", "grad_stats")
        return SimpleNamespace(**{n: getattr(reference, n) for n in names} | replaced)


def test_the_reference_passes() -> None:
    check_ops(reference, block_size=64, max_examples=25)


def narrows_at_once(sources, slots, scale=None, first=0) -> None:
    """Multiplies in the buffer's dtype, as a kernel does that forgets to widen halves."""
    reference.flatten(sources, slots, None, first)
    if scale is not None:
        for view in slots.views[first : first + len(sources)]:
            view.mul_(scale.to(view.dtype))


def forgets_the_tail(sources, slots, scale=None, first=0) -> None:
    reference.flatten(sources, slots, scale, first)
    for view in slots.views[first : first + len(sources)]:
        if view.numel() > 64 and view.is_contiguous():
            view.view(-1)[-1] = 0


def writes_pairs(slots, destinations, scale=None, *, accumulate=False) -> None:
    reference.unflatten(slots, destinations, scale, accumulate=accumulate)
    for tensor in destinations:
        if tensor is not None and tensor.numel() % 2 and not tensor.is_complex():
            end = tensor.storage_offset() + tensor.numel()
            torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), end, (1,))[0] = 0


def keeps_the_first_tensors(sources, slots, scale=None, first=0) -> None:
    """A table that is not made anew when addresses change."""
    key = ("first tensors", first, len(sources))
    reference.flatten(slots.tables.setdefault(key, list(sources)), slots, scale, first)


def freezes_the_scale(slots, destinations, scale=None, *, accumulate=False) -> None:
    if scale is not None:
        scale = slots.tables.setdefault("scale", scale.clone())
    reference.unflatten(slots, destinations, scale, accumulate=accumulate)


def writes_behind_the_window(sources, slots, scale=None, first=0) -> None:
    reference.flatten(sources, slots, scale, first)
    for view in slots.views[first + len(sources) :]:
        view.zero_()


def rounds_fp64_once(sources, slots, scale=None, first=0) -> None:
    """To the nearest bf16, and not through fp32 as torch does: 1 + 2^-8 + 2^-40 rounds up."""
    reference.flatten(sources, slots, scale, first)
    for source, view in zip(sources, slots.views[first:], strict=False):
        if source is not None and source.dtype == torch.float64 and scale is None:
            if view.dtype == torch.bfloat16:
                view[(source > 1 + 2**-8) & (source < 1 + 2**-7)] = 1 + 2**-7


def counts_padding(slots, *, per_tensor=False):
    found = reference.grad_stats(slots, per_tensor=per_tensor)
    return found if per_tensor else found._replace(num_nonfinite=(~slots.flat.isfinite()).sum())


@pytest.mark.parametrize(
    ("replaced", "text"),
    [
        ({"flatten": narrows_at_once}, "the storage of the buffer: element"),
        ({"flatten": forgets_the_tail}, r"TensorCase\(shape=\(65,\)"),
        ({"flatten": keeps_the_first_tensors}, "the storage of the buffer: element"),
        ({"unflatten": freezes_the_scale}, r"destination \d of a second call"),
        ({"flatten": writes_behind_the_window}, "the storage of the buffer: element"),
        ({"flatten": rounds_fp64_once}, "the storage of the buffer: element"),
        ({"unflatten": writes_pairs}, "destination 0: element 17 of 33 and 0 others"),
        ({"grad_stats": counts_padding}, "stretch 0: expected 0 non-finite, found"),
        ({"scale_": lambda tensor, scale: None}, r"the storage of tensor \d: element"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_wrong_is_found(replaced, text) -> None:
    with pytest.raises(AssertionError) as caught:
        check_ops(Broken(**replaced), block_size=64, max_examples=50)
    shown = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(text, shown), shown


def test_a_case_found_can_be_pasted_into_a_test() -> None:
    case = Case(tensors=(TensorCase(shape=(65,), seed=1),), scale=1 / 3)
    assert eval(repr(case), {"Case": Case, "TensorCase": TensorCase}) == case
    with pytest.raises(AssertionError, match="element 80 of 112 and 0 others differ"):
        check_flatten(Broken(flatten=forgets_the_tail), case, torch.device("cpu"))

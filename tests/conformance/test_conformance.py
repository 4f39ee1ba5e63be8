"""PyTorch's own tests of DDP pass with `FusedDDP`, those that can on two ranks, gloo and CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.conformance import listing
from tests.conformance.runner import Runner
from tests.ranks import RankFailure

pytestmark = [
    pytest.mark.skipif(
        not listing.is_listed_version(),
        reason=f"lists the tests of torch {listing.TORCH}, found {listing.installed_version()}",
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forked, as Linux allows"),
]

TESTS = listing.load()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner("fused")
    yield runner
    runner.close()


@pytest.mark.parametrize("test", [t for t in TESTS if t.expect == "pass"], ids=lambda t: t.name)
def test_passes(runner: Runner, test: listing.DdpTest) -> None:
    result = runner.run(test.name, test.mode)
    if result.outcome != "pass":
        raise RankFailure(f"{result.outcome}: {result.report or result.headline}")


def test_list_is_that_of_the_wheel() -> None:
    names = [test.name for test in TESTS]
    assert len(names) == len(set(names))
    assert set(names) == listing.find()


def test_list_says_why_a_test_cannot_pass() -> None:
    assert {test.mode for test in TESTS} == {"plain", "shim"}
    for test in TESTS:
        assert test.expect in ("pass", "cannot")
        assert bool(test.reason) == (test.expect == "cannot"), test


def test_deadline_shows_the_stacks_of_every_rank(runner: Runner) -> None:
    # torch.compile takes two seconds at least; the server has imported everything before.
    runner.run("test_DistributedDataParallel_requires_grad", "plain")
    result = runner.run("test_ddp_compile_static_graph", "shim", deadline_s=1)
    assert result.outcome == "fail"
    _, *stacks = re.split(r"rank \d is stuck; its stacks:\n", result.report)
    assert len(stacks) == 2
    for text in stacks:
        # Not the name of the test: only the innermost 100 frames are shown, and a busy machine is
        # not there yet.
        assert "(most recent call first)" in text and '\n  File "' in text
    assert runner.run("test_DistributedDataParallel_requires_grad", "plain").outcome == "pass"

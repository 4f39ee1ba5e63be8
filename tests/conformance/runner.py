"""Runs tests of the wheel one by one, each on two ranks, in processes that live for one test.

# Note [One fork per rank and test]
Importing torch and its tests takes five seconds, far more than a test, so it happens once: in a
server, a child of the process that runs the tests. For each test the server forks one child per
rank. The server has one thread, no process group, and has never run a backward, so that forking it
is safe. The other design, ranks that live on and share one process group, saves 0.1 s per test but
lets a test see what the one before it left: groups, debug level, hooks, patched names (the shim is
one), a wrapper that is still alive. There a failure would have to be looked for in another test.

# Note [Nothing waits for a hang]
The server gives a test until its deadline, then asks the ranks for their stacks and kills them. If
the server is gone, the ranks kill themselves a little later; if it does not answer, it is killed.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from tests.conformance.listing import MODULE
from tests.ranks import GROUP_TIMEOUT_S

WORLD_SIZE = 2
DEADLINE_S = 60
# A rank whose peer failed or died gets this long to tell its side.
GRACE_S = 3
# What the server may need beside the time of a test: to import torch and its tests before the first
# one, with a cold cache, and to end the ranks. Together with the deadline under pytest's 120 s.
SLACK_S = 40


class Result(NamedTuple):
    """What came of one test: "pass", "fail" or "skip", why in one line, and all there is to say."""

    outcome: str
    headline: str
    report: str
    seconds: float


class Runner:
    """Runs tests with one implementation, "fused" or "torch"; its server starts on first use."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self._server: Any = None
        self._pipe: Connection | None = None

    def run(self, name: str, mode: str, deadline_s: float = DEADLINE_S) -> Result:
        began = time.monotonic()
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send((name, mode, deadline_s))
        if self._pipe.poll(deadline_s + SLACK_S):
            with contextlib.suppress(EOFError):
                return Result(*self._pipe.recv(), time.monotonic() - began)
        self.close()
        headline = "the server of the tests died or did not answer"
        return Result("fail", headline, headline, time.monotonic() - began)

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()  # at which the server kills its ranks and ends
            self._server.join(5)
            self._server.kill()
            self._server.join()
        self._server, self._pipe = None, None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._server = context.Process(target=_serve, args=(self.implementation, theirs))
        self._server.start()
        theirs.close()


# -- the server ----------------------------------------------------------------------------------


class _DriverIsGone(Exception):
    """Nobody is left to run tests for."""


class _Rank:
    """One forked child, as the server sees it."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.pipe = pipe
        self.answer: tuple[str, str, str] | None = None
        self.status: int | None = None

    def end(self) -> int | None:
        """Lets it end as after a training; returns its exit status, or None if it did not."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send("end")
        ends = time.monotonic() + GRACE_S
        while self.status is None and time.monotonic() < ends:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.002)
        return self.status

    def kill(self) -> None:
        if self.status is None:  # not reaped, so that the number is still its own
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.pipe.close()


def _serve(implementation: str, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        with contextlib.suppress(_DriverIsGone):
            _answer_requests(implementation, pipe, Path(folder))
    # Without taking down what was imported: the bindings of Triton report pages of leaks.
    os._exit(0)


def _answer_requests(implementation: str, pipe: Connection, folder: Path) -> NoReturn:
    tests, failure = None, None
    try:
        tests = _import_tests(folder)
    except Exception as error:
        failure = ("fail", f"the tests cannot be imported: {error!r}", traceback.format_exc())
    # Children share the server's memory until it is written to, as a collection would.
    gc.collect()
    gc.freeze()
    count = 0
    while True:
        try:
            name, mode, deadline_s = pipe.recv()
        except EOFError:
            raise _DriverIsGone from None
        if tests is None:
            pipe.send(failure)
            continue
        count += 1
        place = folder / str(count)
        # What the tests' barrier and some tests write to.
        for below in ("barrier", "test_dir"):
            (place / below).mkdir(parents=True)
        answer = _run_on_ranks(tests, implementation, name, mode, place, deadline_s, pipe)
        shutil.rmtree(place)
        pipe.send(answer)


def _import_tests(folder: Path) -> ModuleType:
    # Read when torch and its tests are imported.
    os.environ.update(
        OMP_NUM_THREADS="1",
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD_SIZE),
        INIT_METHOD=f"file://{folder}/unused",  # only its scheme is looked at
        CUDA_VISIBLE_DEVICES="",  # the same tests on a machine with GPUs
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",  # names a command that does not exist here
        TORCHINDUCTOR_COMPILE_THREADS="1",  # a pool of processes would outlive the ranks
    )
    import torch

    # Before the tests: `FusedDDP` is a subclass of what they import as DistributedDataParallel.
    import fusedddp  # noqa: F401

    torch.set_num_threads(1)
    tests = importlib.import_module(MODULE)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"expected one thread, found {threads}: forking is not safe"
    return tests


def _run_on_ranks(
    tests: ModuleType,
    implementation: str,
    name: str,
    mode: str,
    place: Path,
    deadline_s: float,
    driver: Connection,
) -> tuple[str, str, str]:
    ranks = []
    for rank in range(WORLD_SIZE):
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            driver.close()
            ours.close()
            _work(tests, implementation, name, mode, rank, place, deadline_s, theirs)
        theirs.close()
        ranks.append(_Rank(pid, ours))
    try:
        _collect(ranks, time.monotonic() + deadline_s, driver)
        return _judge(ranks, place)
    finally:
        for child in ranks:
            child.kill()


def _collect(ranks: list[_Rank], ends: float, driver: Connection) -> None:
    """Waits for the answers; less long once a rank has failed."""
    pending = {child.pipe: child for child in ranks}
    while pending:
        ready = wait([*pending, driver], timeout=max(0.0, ends - time.monotonic()))
        if driver in ready:  # nothing is sent during a test: the driver is gone
            raise _DriverIsGone
        if not ready:
            return
        for pipe in ready:
            child = pending.pop(pipe)
            try:
                child.answer = pipe.recv()
            except (EOFError, ConnectionResetError):
                child.answer = ("fail", "the process died", "the process died")
            if child.answer[0] == "fail":
                ends = min(ends, time.monotonic() + GRACE_S)


def _judge(ranks: list[_Rank], place: Path) -> tuple[str, str, str]:
    answers = [child.answer for child in ranks]
    outcomes = {answer[0] for answer in answers if answer is not None}
    if None not in answers and outcomes == {"skip"}:
        return ranks[0].answer
    if None not in answers and outcomes == {"pass"}:
        statuses = [child.end() for child in ranks]
        if statuses == [0] * WORLD_SIZE:
            return ("pass", "", "")
        headline = f"expected all ranks to end with status 0, found {statuses} (None: did not end)"
    else:
        headline = next(
            (answer[1] for answer in answers if answer is not None and answer[0] == "fail"),
            f"not finished on all ranks, found {[answer and answer[0] for answer in answers]}",
        )
    lines = [headline]
    for rank, child in enumerate(ranks):
        if child.answer is None:
            lines.append(f"rank {rank} is stuck; its stacks:\n{_stacks(child, rank, place)}")
        else:
            outcome, _, report = child.answer
            lines.append(f"rank {rank}: {outcome}\n{report}")
        output = (place / f"output-{rank}").read_text(errors="replace")[-4000:]
        if output:
            lines.append(f"output of rank {rank}:\n{output}")
    return ("fail", headline, "\n\n".join(lines))


def _stacks(child: _Rank, rank: int, place: Path) -> str:
    path = place / f"stacks-{rank}"
    os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return path.read_text() if path.exists() else "not available"


# -- the ranks -----------------------------------------------------------------------------------


def _work(
    tests: ModuleType,
    implementation: str,
    name: str,
    mode: str,
    rank: int,
    place: Path,
    deadline_s: float,
    pipe: Connection,
) -> NoReturn:
    """Runs one test on one rank; the life of a forked child."""
    status = 1
    try:
        output = os.open(place / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        stacks = (place / f"stacks-{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.dump_traceback_later(2 * deadline_s, exit=True)
        os.environ["TEMP_DIR"] = str(place)
        # What torch.compile keeps would make the first run another one than the next.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / f"inductor-{rank}")
        pipe.send(_run_test(tests, implementation, name, mode, rank, place))
        pipe.recv()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the handlers of the server, whose temporary folder would go.
        os._exit(status)


def _run_test(
    tests: ModuleType, implementation: str, name: str, mode: str, rank: int, place: Path
) -> tuple[str, str, str]:
    try:
        case = _prepare(tests, implementation, name, mode, rank, place)
        getattr(case, name)()
        return ("pass", "", "")
    except unittest.SkipTest as skipped:
        return ("skip", f"skipped by torch: {skipped}", "")
    except SystemExit as exit:  # how tests for processes skip; torch's runner reads the code
        from torch.testing._internal.common_distributed import TEST_SKIPS

        reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if exit.code in reasons:
            return ("skip", f"skipped by torch: {reasons[exit.code]}", "")
        return ("fail", f"exit with status {exit.code}", traceback.format_exc())
    except BaseException as error:
        first_line = str(error).strip().partition("\n")[0]
        return ("fail", f"{type(error).__name__}: {first_line}", traceback.format_exc())


def _prepare(
    tests: ModuleType, implementation: str, name: str, mode: str, rank: int, place: Path
) -> Any:
    """Sets this process up as a rank; returns the test case."""
    import numpy
    import torch
    import torch.distributed as dist

    import fusedddp
    from tests.conformance import shim

    wrapper = torch.nn.parallel.DistributedDataParallel
    if implementation == "fused":
        # The two places where tests look the name up. Not in the module that defines it, whose
        # own methods refer to the class by this name, and would for users.
        wrapper = fusedddp.FusedDDP
        torch.nn.parallel.DistributedDataParallel = wrapper
        tests.DistributedDataParallel = wrapper
    if mode == "shim":
        shim.install(rank, wrapper)

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        pass

    case = Case(name)
    case.rank = rank
    case.file_name = str(place / "rendezvous")
    # Equal on all ranks, as in torch's own runner.
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{case.file_name}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    return case

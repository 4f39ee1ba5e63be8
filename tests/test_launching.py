"""Every way to launch that docs/launching.md describes trains to the same bits."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "launched.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# A launch takes 5 to 15 s on two idle cores, most of it imports of torch. The first test also waits
# for the one that all are compared with.
DEADLINE_S = 100
GRACE_S = 5  # for the others to say what they saw, once a process has failed
pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 40)
# Set by whoever runs the tests on a cluster, and stronger than what a launch passes along.
LAUNCH_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "GLOO_SOCKET_IFNAME",
)


class Process(NamedTuple):
    """One process that a user starts; the launcher may start more."""

    command: Sequence[str]
    environment: Mapping[str, str] = {}


class Host(NamedTuple):
    """A network namespace with one end of the cable that joins it to the other one."""

    namespace: str
    address: str
    interface: str


def launch(folder: Path, *processes: Process) -> list[dict[str, Any]]:
    """Starts the processes, waits until all have ended well, and returns what the ranks wrote."""
    base = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    base["OMP_NUM_THREADS"] = "1"
    running: list[subprocess.Popen[bytes]] = []
    outputs = [folder / f"output{i}.txt" for i in range(len(processes))]
    ends = time.monotonic() + DEADLINE_S
    trouble = ""
    try:
        for process, output in zip(processes, outputs, strict=True):
            # A file, because a pipe that nobody reads fills up; a session, to end it as a whole.
            with output.open("wb") as file:
                running.append(
                    subprocess.Popen(
                        process.command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        env={**base, **process.environment},
                        start_new_session=True,
                    )
                )
        while any(process.poll() is None for process in running):
            now = time.monotonic()
            if now > ends:
                trouble = "not done in time\n"
                break
            if any(process.returncode for process in running):  # others may wait for it for long
                ends = min(ends, now + GRACE_S)
            time.sleep(0.05)
        for number, process in enumerate(running):
            if process.returncode:
                trouble += f"process {number} ended with {process.returncode}\n"
    finally:
        for process in running:
            end(process)
    if trouble:
        texts = (f"{o.name}:\n{o.read_text(errors='replace')[-4000:]}" for o in outputs)
        pytest.fail(trouble + "\n\n".join(texts), pytrace=False)
    files = sorted(folder.glob("rank*.json"))
    assert [file.stem for file in files] == ["rank0", "rank1"]
    return [json.loads(file.read_text()) for file in files]


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its session. torchrun ends its workers, in sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # nothing is left of the session
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ip(*arguments: str) -> str:
    """Runs the `ip` command; skips the test where this is not allowed."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    said = done.stderr.strip()
    if "not permitted" in said or "Permission denied" in said:
        pytest.skip(f"network namespaces are not permitted here: {said}")
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {said}"
    return done.stdout


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    """Two network namespaces that see each other through a veth pair, and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command (iproute2), so no network namespaces")
    tag = f"fusedddp-{uuid.uuid4().hex[:8]}"
    # Addresses and names of interfaces live inside of the namespaces: they collide with nothing.
    hosts = [Host(f"{tag}-{i}", f"10.77.0.{i + 1}", "veth0") for i in range(2)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            ip("netns", "add", host.namespace)
            stack.callback(delete_namespace, host.namespace)
        ip(
            *("link", "add", "name", hosts[0].interface, "netns", hosts[0].namespace, "type"),
            *("veth", "peer", "name", hosts[1].interface, "netns", hosts[1].namespace),
        )
        for host in hosts:
            inside = ("-n", host.namespace)
            ip(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip(*inside, "link", "set", host.interface, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield hosts


def delete_namespace(name: str) -> None:
    # A process that is left would keep the namespace alive, without a name.
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", name)


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks that torchrun started on this machine: what all others are compared with."""
    folder = tmp_path_factory.mktemp("one_machine")
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(folder)]
    return launch(folder, Process(command))


def check_same_bits(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert {outcome["pid"] for outcome in got}.isdisjoint(outcome["pid"] for outcome in want)
    for rank in range(2):
        assert got[rank]["world_size"] == 2
        for way in ("fusedddp", "torch"):
            assert got[rank][way] == want[rank][way], f"{way} on rank {rank}"


def test_torchrun_on_one_machine(one_machine: list[dict[str, Any]]) -> None:
    first, second = one_machine
    assert [first["local_rank"], second["local_rank"]] == [0, 1]
    assert first["network"] == second["network"] == os.stat("/proc/self/ns/net").st_ino
    for outcome in one_machine:
        assert outcome["world_size"] == 2
        assert outcome["fusedddp"] == outcome["torch"]
        losses = [float.fromhex(loss) for loss in outcome["fusedddp"]["losses"]]
        assert len(losses) == 6 and losses == sorted(losses, reverse=True)
    # Each rank learned from its own data, and yet both are the same model.
    assert first["fusedddp"]["losses"][0] != second["fusedddp"]["losses"][0]
    assert first["fusedddp"]["parameters"] == second["fusedddp"]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_on_two_hosts(
    rendezvous: str, two_hosts: list[Host], one_machine: list[dict[str, Any]], tmp_path: Path
) -> None:
    main = two_hosts[0].address
    processes = []
    for number, host in enumerate(two_hosts):
        options = {
            "static": [
                *("--node-rank", str(number), "--master-addr", main, "--master-port", "29500")
            ],
            "c10d": [
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{main}:29500"),
                *("--rdzv-id", "test", "--local-addr", host.address),
                # Both namespaces have the name of this machine, which tells torchrun nothing.
                *("--rdzv-conf", f"is_host={int(number == 0)}"),
            ],
        }
        command = [
            *("ip", "netns", "exec", host.namespace, *TORCHRUN, "--nnodes", "2"),
            *("--nproc-per-node", "1", *options[rendezvous], str(SCRIPT), str(tmp_path)),
        ]
        processes.append(Process(command, {"GLOO_SOCKET_IFNAME": host.interface}))
    got = launch(tmp_path, *processes)
    check_same_bits(got, one_machine)
    assert [outcome["local_rank"] for outcome in got] == [0, 0]
    # They really were apart: no rank shares a network with the other one or with this test.
    networks = {outcome["network"] for outcome in (*got, one_machine[0])}
    assert len(networks) == 3


def test_spawn(one_machine: list[dict[str, Any]], tmp_path: Path) -> None:
    launcher = str(ROOT / "examples" / "launch_spawn.py")
    got = launch(
        tmp_path, Process([sys.executable, launcher, "--nproc", "2", str(SCRIPT), str(tmp_path)])
    )
    check_same_bits(got, one_machine)
    assert [outcome["local_rank"] for outcome in got] == [0, 1]


def test_plain_python(one_machine: list[dict[str, Any]], tmp_path: Path) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    got = launch(
        tmp_path,
        *(
            Process(
                [sys.executable, str(SCRIPT), str(tmp_path)],
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ),
    )
    check_same_bits(got, one_machine)
    assert [outcome["local_rank"] for outcome in got] == [0, 1]


def test_submitit(one_machine: list[dict[str, Any]], tmp_path: Path) -> None:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("needs submitit: pip install submitit")
    command = [
        *(sys.executable, str(ROOT / "examples" / "launch_slurm.py"), "--cluster", "local"),
        *("--ntasks-per-node", "2", "--folder", str(tmp_path / "logs"), str(SCRIPT), str(tmp_path)),
    ]
    got = launch(tmp_path, Process(command, {"MASTER_PORT": str(free_port())}))
    check_same_bits(got, one_machine)
    assert [outcome["local_rank"] for outcome in got] == [0, 1]

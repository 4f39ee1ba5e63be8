"""Submits a training script to SLURM with submitit, or runs it here with submitit's local executor.

    python examples/launch_slurm.py --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 \\
        --partition gpu train.py --its arguments
    python examples/launch_slurm.py --cluster local --ntasks-per-node 2 examples/train_digits.py

One task is one rank. The job runs in the current folder; its logs are in --folder, which has to be
on a disk that all nodes share.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

import submitit
from submitit.helpers import TorchDistributedEnvironment


def run_script(command: list[str]) -> None:
    """One rank, inside of the job: translates what SLURM says, then runs the script."""
    # LOCAL_RANK counts the GPUs of a node, so each task has to see all of them: with the default,
    # set_cuda_visible_devices=True, it would see its own only, as number 0. The job inherits the
    # variables of the shell that submitted it, maybe those of another launch: overwrite them.
    environment = TorchDistributedEnvironment()
    environment.export(set_cuda_visible_devices=False, overwrite=True)
    if submitit.JobEnvironment().cluster == "local":
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # the name of this machine may not resolve
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)  # as if python had started the script
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:  # submitit only knows results and exceptions
        if end.code not in (None, 0):
            raise RuntimeError(f"{command[0]} ended with exit status {end.code}") from end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", choices=["slurm", "local"], default="slurm")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ntasks-per-node", type=int, default=1, help="ranks on each node")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--cpus-per-task", type=int, default=1)
    parser.add_argument("--timeout-min", type=int, default=60)
    parser.add_argument("--partition", help="of SLURM; the default of the cluster if left out")
    parser.add_argument("--folder", default="slurm_logs", help="logs and submitit's files")
    parser.add_argument("script", help="training script; what follows are its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    executor = submitit.AutoExecutor(folder=args.folder, cluster=args.cluster)
    executor.update_parameters(
        name=Path(args.script).stem,
        nodes=args.nodes,
        tasks_per_node=args.ntasks_per_node,
        cpus_per_task=args.cpus_per_task,
        timeout_min=args.timeout_min,
    )
    if args.gpus_per_node:  # clusters without GPUs refuse the option, even with 0
        executor.update_parameters(gpus_per_node=args.gpus_per_node)
    if args.partition:
        executor.update_parameters(slurm_partition=args.partition)
    # From SLURM 22.05 on, srun does not take this number from the job.
    executor.update_parameters(slurm_srun_args=[f"--cpus-per-task={args.cpus_per_task}"])
    job = executor.submit(run_script, [args.script, *args.arguments])
    print(f"job {job.job_id}, logs in {job.paths.folder}", flush=True)
    if args.cluster == "local":
        job.results()  # waits for every rank, and raises with the traceback of one that failed
        print(job.task(0).stdout() or "", end="")


if __name__ == "__main__":
    main()

"""``python -m fusedddp.check script.py:function``: `check_capturable` from the command line.

Loads the script without its ``if __name__ == "__main__"`` part and calls the function, without
arguments. It is either the training step itself, which then has run once before it is checked, or
makes everything ready and returns ``(step, args)``. Under torchrun the function joins the process
group itself, as a training script does, and each rank prints its own report.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from fusedddp.capturable import check_capturable

OK, FOUND, FAILED = 0, 1, 2  # exit statuses; FAILED is that of argparse for wrong usage


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the step that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedddp.check",
        description="Reports what stands against capturing a training step in a CUDA graph.",
        epilog="Exit status: 0 nothing found, 1 findings, 2 wrong usage or the script raised.",
    )
    parser.add_argument("target", metavar="script.py:function", help="the step, or what returns it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="sys.argv of the script")
    options = parser.parse_args(argv)
    path, colon, name = options.target.rpartition(":")
    if not colon or not path or not name:
        parser.error(f"expected script.py:function, found {options.target!r}")
    if not Path(path).is_file():
        parser.error(f"expected a Python file, found nothing at {path!r}")
    sys.argv = [path, *options.arguments]
    try:
        module = _load(Path(path))
        function = _find(module, name)
        wrong = _what_is_wrong(module, function)
        if wrong is None:
            step, args = _step_of(function)
            report = check_capturable(step, *args)
    except (Exception, SystemExit):
        traceback.print_exc()
        return FAILED
    if wrong is not None:
        parser.error(f"expected a function {name!r} without arguments in {path}, found {wrong}")
    print(_with_rank(str(report)), flush=True)
    return OK if report.ok else FOUND


def _load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script that is started
    # Under its own name, so that what it defines can be pickled; never __main__.
    name = path.stem if path.stem not in sys.modules else f"_checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a Python file, found {path}: its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str) -> Any:
    """What a name, with dots perhaps, stands for in a script; None for nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _what_is_wrong(module: ModuleType, function: Any) -> str | None:
    """Why `function` is none that can be called without arguments, if so."""
    if not callable(function):
        names = [n for n, v in vars(module).items() if _is_own_function(v, module)]
        found = "nothing" if function is None else f"a {type(function).__name__}"
        return f"{found}. Functions there: {', '.join(names) or 'none'}"
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        return f"one that takes some ({error}). Name one that returns (step, args) instead"
    except ValueError:  # no signature to be had
        pass
    return None


def _is_own_function(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _step_of(function: Callable[[], Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    made = function()
    if isinstance(made, tuple) and made and callable(made[0]):
        step, *rest = made
        if len(rest) == 1 and isinstance(rest[0], (tuple, list)):
            return step, rest[0]
        raise TypeError(
            f"expected {function.__name__}() to return (step, args) with a tuple of arguments, "
            f"found {len(made)} items of types {', '.join(type(item).__name__ for item in made)}."
        )
    return function, ()


def _with_rank(text: str) -> str:
    if not dist.is_initialized() and "RANK" not in os.environ:
        return text
    rank = dist.get_rank() if dist.is_initialized() else os.environ["RANK"]
    return "\n".join(f"[rank {rank}] {line}".rstrip() for line in text.split("\n"))


if __name__ == "__main__":
    status = main()
    if dist.is_initialized():
        gc.collect()  # models go before the group
        dist.destroy_process_group()
    sys.exit(status)

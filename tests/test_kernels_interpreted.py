"""Runs `kernel_properties.py` in a process in which Triton interprets its kernels.

The switch has to be set before Triton is imported and cannot be taken back, and other tests of this
process need compiled kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")


def test_kernels_in_the_interpreter() -> None:
    properties = Path(__file__).with_name("kernel_properties.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", properties],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=properties.parent.parent,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout

"""What `check_capturable` hands back: findings, each with a line and a remedy. Plain data."""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A line of somebody's own code."""

    file: str
    line: int

    @property
    def source(self) -> str:
        """The text of the line; empty when the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One thing that breaks a capture, or that every replay would repeat.

    Attributes:
        kind: one of the kinds in ``docs/check_capturable.md``, ``"host-sync"`` for example.
        message: what was found.
        remedy: what to do instead.
        place: the line of your own code that it comes from.
    """

    kind: str
    message: str
    remedy: str
    place: Place

    @property
    def file(self) -> str:
        return self.place.file

    @property
    def line(self) -> int:
        return self.place.line

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.place}"]
        if self.place.source:
            lines.append(f"    {self.place.source}")
        lines += [f"  {self.message}", f"  Do: {self.remedy}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class CaptureReport:
    """What one step did that a CUDA graph of it cannot do, or would do the same way for ever.

    Attributes:
        findings: what breaks the capture or is frozen by it, in the order of the step.
        undecided: what may do so and cannot be told from this run, each with how to find out.
    """

    findings: tuple[Finding, ...]
    undecided: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found; what cannot be told here does not count."""
        return not self.findings

    def __str__(self) -> str:
        found, open_ = len(self.findings), len(self.undecided)
        head = (
            "Nothing was found that stands against capturing this step."
            if self.ok
            else f"This step cannot be captured as it is: {found} finding{'s' * (found > 1)}."
        )
        blocks = [head, *map(str, self.findings)]
        if open_:
            blocks.append(f"Cannot tell here ({open_}):")
            blocks += map(str, self.undecided)
        return "\n\n".join(blocks)

    def raise_if_bad(self) -> None:
        """Raises the report, if there are findings.

        Raises:
            RuntimeError: with the text of the report.
        """
        if not self.ok:
            raise RuntimeError(f"expected a step that can be captured, found:\n\n{self}")

"""``python -m tests.conformance [--impl torch] [NAME ...]`` runs tests and prints the results.

Without names: every test that has to pass, or with ``--all`` every test.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.conformance import listing
from tests.conformance.runner import DEADLINE_S, Runner


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tests, by their full names")
    parser.add_argument("--impl", choices=["fused", "torch"], default="fused")
    parser.add_argument("--all", action="store_true", help="those that cannot pass, too")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="SECONDS")
    parser.add_argument("-v", "--verbose", action="store_true", help="all there is on failures")
    arguments = parser.parse_args()
    if not listing.is_listed_version():
        print(f"expected torch {listing.TORCH}, found {listing.installed_version()}")
        return 2
    rows = {row.name: row for row in listing.load()}
    unknown = set(arguments.names) - rows.keys()
    if unknown:
        parser.error(f"not in {listing.PATH.name}: {', '.join(sorted(unknown))}")
    chosen = [rows[name] for name in arguments.names] or [
        row for row in rows.values() if arguments.all or row.expect == "pass"
    ]
    began = time.monotonic()
    counts: dict[str, int] = {}
    missed = 0
    runner = Runner(arguments.impl)
    try:
        for row in chosen:
            result = runner.run(row.name, row.mode, arguments.deadline)
            counts[result.outcome] = counts.get(result.outcome, 0) + 1
            missed += row.expect == "pass" and result.outcome != "pass"
            print(
                f"{result.outcome}  {result.seconds:5.1f} s  {row.mode:5}  {row.name}"
                f"{'  ' if result.headline else ''}{result.headline}",
                flush=True,
            )
            if result.report and (arguments.verbose or len(arguments.names) == 1):
                print(result.report)
    finally:
        runner.close()
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{arguments.impl}: {summary} in {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

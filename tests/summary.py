"""The last lines of scripts/test: why tests were skipped, and one line with the sum over all layers.

usage: summary.py FAILED_LAYERS DIRECTORY_OF_JUNIT_REPORTS

Plain Python without dependencies: it also has to run where no environment could be made.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def main(failed_layers: int, reports: Path) -> int:
    passed, failed, skipped = 0, failed_layers, Counter[str]()
    for report in sorted(reports.glob("*.xml")):
        for case in ET.parse(report).iter("testcase"):
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif skip is not None:
                skipped[skip.get("message", "no reason given")] += 1
            else:
                passed += 1
    if skipped:
        print("\n== skipped")
        for reason, count in skipped.most_common():
            print(f"{count:5d}  {reason}")
    print(f"\n{passed} passed, {failed} failed, {skipped.total()} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))

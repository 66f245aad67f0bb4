"""docs/measurements.md is what its evidence says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_measurements_page_is_generated_from_the_evidence() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tests/gpu/report.py"), "--check"], check=False)
    assert done.returncode == 0, "run python3 tests/gpu/report.py"

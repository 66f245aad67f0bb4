"""The vector math header of the CPU device: accuracy over all floats, NaN and infinity, and that GCC vectorises it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "agent-image" / "include"
SWEEP = HERE / "kernelfleet_math_sweep.cpp"
MAX_ULP = 4.0


@pytest.fixture(scope="module", params=["fast", "off"])
def built(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The sweep, with products that join additions and without, as a program and what the compiler said about vectorised loops."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    program = tmp_path_factory.mktemp("math") / "sweep"
    flags = [
        "-O3",
        "-march=native",
        "-fopenmp",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fopt-info-vec-optimized",
        f"-ffp-contract={request.param}",
    ]
    done = subprocess.run(
        [compiler, *flags, f"-I{INCLUDE}", str(SWEEP), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return program, done.stderr


def test_every_function_is_within_four_units_in_the_last_place_of_double(built: tuple[Path, str]) -> None:
    rows = subprocess.run([built[0], "4001"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(rows) == 14
    for row in rows:
        name, error, where, wrong = row.split()
        assert float(error) <= MAX_ULP, f"kf_{name} is {error} units off at {where}"
        assert wrong == "0", f"kf_{name} has {wrong} wrong NaN or infinities"


def test_a_loop_over_each_function_is_vectorised(built: tuple[Path, str]) -> None:
    if "loop vectorized" not in built[1]:
        pytest.skip("this compiler doesn't say what it vectorised")
    vectorised = {
        int(line) for line in re.findall(r"kernelfleet_math_sweep\.cpp:(\d+):\d+: optimized: loop vectorized", built[1])
    }
    for number, line in enumerate(SWEEP.read_text().splitlines(), 1):
        if line.startswith("SWEEP_LOOP("):
            assert number in vectorised, f"{line} stayed scalar"

"""The rule by which outputs are compared, on tensors made for it."""

from __future__ import annotations

import math

import pytest
import torch
from test_host import host, zygote  # noqa: F401  (puts the host's package on the path)

from kernelfleet_host import compare  # noqa: E402  isort:skip


def judged(c: torch.Tensor, r: torch.Tensor, d: torch.Tensor) -> bool:
    """Whether the full rule accepts `c` beside the reference `r` and the float64 run `d`."""
    error, exact = compare.summed(r, d).grouped(), compare.summed(d).grouped()
    return compare.judge(compare.summed(c, d).grouped(), error, exact, torch.float32, None).match


def noisy(d: torch.Tensor, seed: int, size: float) -> torch.Tensor:
    """`d` with an absolute error, as a sum of many products has it."""
    noise = torch.randn(d.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (d + size * noise).float()


def test_a_column_that_relu_left_almost_empty_is_allowed_the_error_of_any_other() -> None:
    d = torch.randn(512, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d[:, 5] = -1.0
    d[7, 5] = -1e-5  # a hair under zero: the candidate's error lifts it over, the reference's does not
    r, c = torch.relu(noisy(d, 1, 2e-5)), torch.relu(noisy(d, 2, 2e-5))
    r[7, 5], c[7, 5] = 0.0, 1.5e-5
    assert judged(c, r, torch.relu(d))


def test_small_rows_beside_large_ones_must_be_right_for_themselves() -> None:
    d = torch.randn(512, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.ones(512, 1, dtype=torch.float64)
    scale[::8] = 1e4
    r = d * scale * (1 + 1e-7 * torch.randn(d.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    c = (d * scale).clone()
    c[3] *= 1.001
    assert judged((d * scale).float(), r.float(), d * scale)
    assert not judged(c.float(), r.float(), d * scale)


@pytest.mark.parametrize("shape", [(7, 130), (3, 5, 40), (2, 3, 4, 5), (50,), (300, 1)])
def test_quick_sums_are_the_slow_ones(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator)
    for y in (None, x + 1e-6 * torch.randn(shape, generator=generator), torch.zeros(shape, dtype=torch.float64)):
        slow, quick = compare.Sums(shape), compare.Sums(shape)
        where = (slice(0, shape[0]),)
        slow.add((x.double() if y is None else x.double() - y.double()).abs(), where)
        assert compare._add_quickly(quick, x, y, where)
        tolerance = 1e-6 if y is None or y.dtype == torch.float64 else 1e-1
        for name in ("row_squares", "row_max", "channel_squares", "channel_max"):
            torch.testing.assert_close(getattr(quick, name), getattr(slow, name), rtol=tolerance, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-30, 1e30])
def test_quick_sums_leave_what_could_leave_the_type(value: float) -> None:
    x = torch.ones(4, 100)
    x[2] = value
    assert not compare._add_quickly(compare.Sums((4, 100)), x, None, (slice(0, 4),))

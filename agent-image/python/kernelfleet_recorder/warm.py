"""What PyTorch does lazily, done once in the zygote so that no recording pays for it.

Knows a tiny model of its own. Must not leave a trace: no session, no mode, no parallel operator (a child forked after
an OpenMP region hangs in its own first), the generator as it was.
"""

from __future__ import annotations

import torch
from kernelfleet_ext import _session

from kernelfleet_recorder.intercept import DispatchLayer, FunctionLayer, data_less
from kernelfleet_recorder.session import Session


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.conv = torch.nn.Conv2d(1, 1, 1)
        self.norm = torch.nn.BatchNorm2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x.view(4).unsqueeze(0).transpose(0, 1)[1:].to(x.device))
        y.zero_()
        (self.linear.weight * 2).t().contiguous()
        return y


def warm() -> None:
    """Records the tiny model and throws the result away."""
    # Without a driver the guards that PyTorch puts around calls on `cuda` tensors would raise; this makes them no-ops.
    torch._C._ensureCUDADeviceGuardSet()
    generator = torch.get_rng_state()
    threads = torch.get_num_threads()
    session = Session("cpu", {})
    _session.activate(session)
    try:
        with torch.no_grad(), FunctionLayer(session), DispatchLayer(session):
            session.phase = "forward"
            model = _Model().eval()
            x = data_less(session, "input", 0, (2, 2), (2, 1), torch.float32, 16)
            session.outputs(model(x))
            model.load_state_dict(model.state_dict())
    finally:
        _session.activate(None)
        torch.set_rng_state(generator)
    if torch.get_num_threads() != threads:
        raise RuntimeError("the warm-up changed the number of threads")

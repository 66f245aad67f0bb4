"""Parameter sets: fresh weights for a seed, affine parameters and normalisation buffers away from their defaults.

Knows which parameters have defaults that hide mistakes (a copy passes for a LayerNorm with weight 1 and bias 0).
Must not know where sets are shared.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from kernelfleet_host.task import Task
from kernelfleet_host.tensors import Meta


def fresh(task: Task, seed: int, half: bool) -> torch.nn.Module:
    """A model on the CPU with the parameter set of `seed`; the same seed gives the same bytes."""
    model = task.build(seed)
    move_from_defaults(model, seed)
    return model.half() if half else model


def move_from_defaults(model: torch.nn.Module, seed: int) -> None:
    """Moves constant parameters and running statistics by amounts that `seed` and the name fix.

    Ones become 0.5 to 1.5, zeros -0.25 to 0.25, running means -0.5 to 0.5, running variances 0.5 to 1.5 times
    what they were. Integer buffers, random weights and other buffers (masks, tables) stay.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            first = parameter.reshape(-1)[0].item()
            if parameter.numel() > 1 and not bool((parameter == first).all()):
                continue
            noise = torch.rand(parameter.shape, generator=_generator(seed, name)).to(parameter.dtype)
            parameter.copy_((noise - 0.5) * 0.5 if first == 0 else first * (0.5 + noise))
        for prefix, module in model.named_modules():
            if not isinstance(module, _NormBase):
                continue
            path = f"{prefix}." if prefix else ""
            mean, var = module.running_mean, module.running_var
            if mean is not None:
                mean.add_(torch.rand(mean.shape, generator=_generator(seed, path + "running_mean")) - 0.5)
            if var is not None:
                var.mul_(torch.rand(var.shape, generator=_generator(seed, path + "running_var")) + 0.5)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the state dict, in order (extra state that is no tensor is left out)."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def layout(metas: dict[str, Meta]) -> tuple[list[dict[str, Any]], int]:
    """Wire records with 64-aligned offsets, and the bytes of all together."""
    records = []
    offset = 0
    for name, meta in metas.items():
        records.append({"name": name, **meta.wire(), "offset": offset})
        offset += -(-meta.span // 64) * 64
    return records, offset


def install(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Copies `values` into the state of `model` in place (any device)."""
    with torch.no_grad():
        for name, target in state(model).items():
            target.copy_(values[name])

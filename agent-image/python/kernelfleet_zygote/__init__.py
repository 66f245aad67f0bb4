"""What every Python process of a judge shares: frames on descriptor 3, the fork server, confinement after the fork.

Knows `docs/interfaces.md` ("Wire", the `fork` request). Must not know what the children do, nor import torch.
"""

from kernelfleet_zygote.wire import Channel, Closed, Malformed, Memory, Refused, serve_ops
from kernelfleet_zygote.zygote import Start, serve

__all__ = ["Channel", "Closed", "Malformed", "Memory", "Refused", "Start", "serve", "serve_ops"]

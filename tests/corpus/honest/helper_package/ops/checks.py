import torch


def checked(x):
    assert isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.is_contiguous(), "float32, contiguous"
    return x.contiguous().float().detach()

"""The way of small tables of numbers from the host to the rows' device, without waiting for it."""

from collections.abc import Sequence

import torch


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of host numbers on a device.

    From ordinary memory a copy to a GPU first waits until all that was launched before it is done, the
    forward pass included. From pinned memory it takes its place behind it.

    Args:
        values: Numbers, or equally long sequences of them.
        dtype: Type of the tensor.
        device: Where it is wanted.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)

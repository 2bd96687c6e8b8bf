"""Puts a checkpoint's tensors into a module; whatever does not fit is refused by name."""

from collections.abc import Iterable

import torch
from torch import nn

from engine.errors import ModelNotSupported, StartupError
from engine.speculation.heads.checkpoint import Checkpoint

_SHOWN = 5


def check_tensors(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Compares names and shapes, before anything is read.

    Args:
        module: What the tensors are for; it may be on the meta device.
        checkpoint: Tensors by the module's names.

    Raises:
        StartupError: Tensors are missing, left over or of another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if missing := sorted(expected.keys() - checkpoint.names):
        raise StartupError(
            f"{checkpoint.what} lacks {_some(missing)}: it is incomplete, or its config is another head's"
        )
    if leftover := sorted(checkpoint.names - expected.keys()):
        raise StartupError(
            f"{checkpoint.what} holds {_some(leftover)}, which nothing in its config accounts for: to leave "
            "out a part would draft with another head than was trained"
        )
    for name, shape in expected.items():
        if (found := checkpoint.shape(name)) != shape:
            raise StartupError(f"{name} of {checkpoint.what} is {list(found)}; {list(shape)} was expected")


def fill(module: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Gives a module of the meta device a checkpoint's tensors.

    Args:
        module: What they are for.
        checkpoint: Tensors by the module's names.
        dtype: The type they get.

    Raises:
        StartupError: They do not fit, or are damaged.
    """
    check_tensors(module, checkpoint)
    tensors = {name: checkpoint.floats(name, dtype) for name in module.state_dict()}
    module.load_state_dict(tensors, assign=True)
    module.eval().requires_grad_(False)


def check_ids(ids: torch.Tensor, vocab_size: int, name: str, what: str) -> torch.Tensor:
    """Refuses a draft vocabulary that is not one.

    Args:
        ids: int64 [draft_vocab_size], the target's ids of the draft's.
        vocab_size: Ids of the target.
        name: The tensor that they come from.
        what: The head, for messages.

    Raises:
        ModelNotSupported: An id is not the target's.
        StartupError: There are none, or two of them stand for one.
    """
    if not len(ids):
        raise StartupError(f"{name} of {what} is empty: the head could not draft a token")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ModelNotSupported(
            f"{name} of {what} points at ids from {low} to {high}, but the target's end at {vocab_size - 1}: "
            "the head was trained for another vocabulary, or the file is damaged"
        )
    if len(set(ids.tolist())) < len(ids):
        raise StartupError(f"{name} of {what} is damaged: two ids of the draft stand for one of the target")
    return ids


def listed_ids(checkpoint: Checkpoint, name: str, rows: int, vocab_size: int) -> torch.Tensor:
    """A draft vocabulary that is written as the target's ids.

    Args:
        checkpoint: Where it is.
        name: Its tensor.
        rows: Its size.
        vocab_size: Ids of the target.

    Returns:
        int64 [rows].

    Raises:
        ModelNotSupported: An id is not the target's.
        StartupError: It is missing or damaged.
    """
    check_vector(checkpoint, name, rows)
    return check_ids(checkpoint.integers(name), vocab_size, name, checkpoint.what)


def check_vector(checkpoint: Checkpoint, name: str, length: int) -> None:
    """Refuses a tensor that is not one row of a given length.

    Raises:
        StartupError: It is missing, or of another shape.
    """
    if name not in checkpoint.names:
        raise StartupError(f"{checkpoint.what} lacks {name}")
    if (found := checkpoint.shape(name)) != (length,):
        raise StartupError(f"{name} of {checkpoint.what} is {list(found)}; [{length}] was expected")


def count_of(indices: Iterable[int], what: str, checkpoint: Checkpoint) -> int:
    """How many things of a kind there are, numbered from 0.

    Raises:
        StartupError: A number is left out.
    """
    found = sorted(set(indices))
    for place, index in enumerate(found):
        if place != index:
            raise StartupError(f"{checkpoint.what} lacks {what} {place}, but has {what} {index}")
    return len(found)


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

"""What a training needs to go on after an interruption, in one file."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.errors import StartupError


class Checkpoint:
    """A file that is replaced as a whole, so that there is a whole one at any time.

    Args:
        path: Where it is.
        fingerprint: What it must have been written with; other settings cannot go on with it.
        device: Where tensors are loaded to.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, object], device: torch.device) -> None:
        self._path = path
        self._fingerprint = dict(fingerprint)
        self._device = device

    def save(
        self,
        head: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        state: Any,
        losses: Sequence[tuple[float, ...]],
        history: Sequence[Any],
    ) -> None:
        """Writes it."""
        part = self._path.with_suffix(".part")
        torch.save(
            {
                "fingerprint": self._fingerprint,
                "head": head.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": generator.get_state(),
                "state": _plain(state),
                "losses": [list(row) for row in losses],
                "history": [_plain(row) for row in history],
            },
            part,
        )
        os.replace(part, self._path)

    def load(self) -> dict[str, Any] | None:
        """What was written, or None if nothing was.

        Raises:
            StartupError: It is damaged, or of a training with other settings.
        """
        if not self._path.exists():
            return None
        try:
            kept: dict[str, Any] = torch.load(self._path, map_location=self._device, weights_only=True)
            found = kept["fingerprint"]
        except Exception as error:
            # Bytes that are no pickle can fail anywhere in the unpickler, with any error.
            raise StartupError(f"{self._path} is damaged ({error}): delete it to train anew") from error
        for name in {**found, **self._fingerprint}:
            if (was := found.get(name)) != (value := self._fingerprint.get(name)):
                raise StartupError(
                    f"{self._path} is of a training with {name} {was}, not {value}: delete it to train anew, "
                    "or give the same settings to go on"
                )
        kept["generator"] = kept["generator"].cpu()
        return kept


def _plain(value: Any) -> Any:
    assert is_dataclass(value)
    assert not isinstance(value, type)
    return {name: list(item) if isinstance(item, tuple) else item for name, item in asdict(value).items()}

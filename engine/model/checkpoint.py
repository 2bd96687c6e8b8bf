"""The weights of a Hugging Face folder, read one at a time into memory of their own.

The safetensors library maps its files, and what has been read of a mapping counts as resident memory, beside
what is made of it. Here nothing is mapped. The format: the header's length in 8 bytes, little-endian; the
header, JSON; the tensors. Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.model.tensor_file import DamagedFile, fill_tensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS = "model.safetensors"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Where a weight lies.

    Attributes:
        file: Its file.
        dtype: Its type.
        shape: Its shape.
        offset: Its first byte.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """The weights in a folder's safetensors files, those that are float32 or narrower.

    Args:
        folder: With model.safetensors, or with shards and their index.

    Attributes:
        weights: Where each weight lies, by name.

    Raises:
        DamagedFile: They are not there, or a header cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.weights: dict[str, StoredWeight] = {}
        try:
            for file in _files(folder):
                self.weights |= _read_header(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(
                f"there are no safetensors files in {folder} that can be read: {error}"
            ) from error

    def read(self, name: str) -> torch.Tensor:
        """A weight, in the type that it is stored in.

        Raises:
            DamagedFile: The file cannot be read, or is too short.
        """
        stored = self.weights[name]
        return self._read(stored, stored.shape, stored.offset)

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Some rows of a weight, [end - begin, ...].

        Raises:
            DamagedFile: The file cannot be read, or is too short.
        """
        stored = self.weights[name]
        row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        return self._read(stored, (end - begin, *stored.shape[1:]), stored.offset + begin * row)

    def _read(self, stored: StoredWeight, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=stored.dtype)
        try:
            with stored.file.open("rb", buffering=0) as file:
                whole = fill_tensor(tensor, file, offset)
        except OSError as error:
            raise DamagedFile(f"{stored.file} cannot be read: {error}") from error
        if not whole:
            raise DamagedFile(f"{stored.file} ends before its last weight")
        return tensor


def _files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = json.loads((folder / f"{_WEIGHTS}.index.json").read_text("utf-8"))
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def _read_header(path: Path) -> dict[str, StoredWeight]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} has no header")
        header = json.loads(file.read(length))
    first = _LENGTH_BYTES + length
    found = {}
    for name, entry in header.items():
        if name == "__metadata__" or (dtype := _DTYPES.get(entry["dtype"])) is None:
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path} has {end - begin} bytes for {name}, whose shape is {shape}")
        found[name] = StoredWeight(path, dtype, shape, first + begin)
    return found

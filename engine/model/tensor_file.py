"""Tensors in a file, one after the other, written and read one at a time.

Nothing is mapped or held twice: a model that is read from such a file takes the memory of its tensors alone.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class DamagedFile(Exception):
    """A file does not hold what was written to it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a file.

    Attributes:
        name: Its name.
        dtype: Its type, as torch names it.
        shape: Its shape.
        offset: Its first byte.
        checksum: CRC-32 of its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int


def write_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[StoredTensor, ...]:
    """Writes tensors and returns where each one lies.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    index = []
    with path.open("wb") as file:
        for name, tensor in tensors:
            data = _bytes_of(tensor.contiguous())
            dtype = str(tensor.dtype).removeprefix("torch.")
            index.append(StoredTensor(name, dtype, tuple(tensor.shape), file.tell(), zlib.crc32(data)))
            file.write(data)
    return tuple(index)


class TensorFile:
    """A file of tensors, for reading.

    Args:
        path: The file.
        index: What `write_tensors` returned.

    Raises:
        DamagedFile: It is not there, or has another size.
    """

    def __init__(self, path: Path, index: Iterable[StoredTensor]) -> None:
        self._index = {entry.name: entry for entry in index}
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def names(self, prefix: str = "") -> list[str]:
        """The names that begin with a prefix."""
        return [name for name in self._index if name.startswith(prefix)]

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own.

        Raises:
            DamagedFile: Its bytes are not those that were written.
        """
        entry = self._index[name]
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        whole = fill_tensor(tensor, self._file, entry.offset)
        if not whole or zlib.crc32(_bytes_of(tensor)) != entry.checksum:
            raise DamagedFile(f"{self._file.name} is damaged at {name}")
        return tensor


def fill_tensor(tensor: torch.Tensor, file: FileIO, offset: int) -> bool:
    """Reads a contiguous tensor's bytes from an offset on; whether the file had them all."""
    data = _bytes_of(tensor)
    file.seek(offset)
    done = 0
    while done < len(data) and (count := file.readinto(data[done:])):
        done += count
    return done == len(data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, not a copy of it."""
    return tensor.view(-1).view(torch.uint8).numpy().data

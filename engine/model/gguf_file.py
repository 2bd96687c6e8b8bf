"""A GGUF file: its header, and its tensors one at a time.

The gguf package's own reader takes ten seconds and half a gigabyte for a vocabulary of 150,000 tokens, and it
maps the file, so that what has been read of it counts as resident memory. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
_AT_A_TIME = 1 << 16
"""Numbers that are unpacked at once: few enough to stay in the cache, enough that Python does not count."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        name: Its name.
        kind: How its numbers are stored.
        shape: Its shape, the innermost dimension last.
        offset: Its first byte in the file.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the file."""
        numbers, size = map(int, GGML_QUANT_SIZES[self.kind])
        return math.prod(self.shape) // numbers * size


class GgufFile:
    """A GGUF file whose header has been read.

    Args:
        path: The file.

    Attributes:
        path: The file.
        fields: Its metadata.
        tensors: Its tensors, by name, in the order of the file.

    Raises:
        ValueError: It is no GGUF file, or of a version that is not known, or it ends too early.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self._outline: list[bytes] = []
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if cursor.take(len(_MAGIC)) != _MAGIC:
                raise ValueError("it does not begin as GGUF files do")
            (version,) = cursor.unpack("I")
            if version not in _VERSIONS:
                raise ValueError(f"its format is version {version}, and only 2 and 3 are known")
            num_tensors, num_fields = cursor.unpack("QQ")
            for _ in range(num_fields):
                self._read_field(cursor)
            found = [_read_tensor(cursor) for _ in range(num_tensors)]
            first = _rounded_up(cursor.position, self._alignment)
            self.tensors = {tensor.name: _placed(tensor, first, len(data)) for tensor in found}

    @property
    def architecture(self) -> str:
        """What kind of model it holds, as llama.cpp calls it."""
        return str(self.fields["general.architecture"])

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's numbers, in memory of their own.

        Raises:
            ValueError: They are stored in a way that the gguf package cannot undo.
            OSError: The file cannot be read.
        """
        tensor = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        if (plain := _PLAIN.get(tensor.kind)) is not None:
            return raw.view(plain).reshape(tensor.shape).astype(np.float32, copy=False)
        numbers, size = GGML_QUANT_SIZES[tensor.kind]
        result = np.empty(math.prod(tensor.shape), np.float32)
        for begin in range(0, len(result), _AT_A_TIME):
            end = min(begin + _AT_A_TIME, len(result))
            # What is in one block depends on no other, so where a row of the matrix ends is all the same.
            blocks = raw[begin // numbers * size : end // numbers * size]
            try:
                result[begin:end] = dequantize(blocks[None], tensor.kind)[0]
            except NotImplementedError as error:
                raise ValueError(f"its tensor {name} is stored as {tensor.kind.name}: {error}") from error
        return result.reshape(tensor.shape)

    def write_outline(self, path: Path, **added: int) -> None:
        """Writes a file with this one's metadata, its vocabulary left out, and its tensors' names alone.

        Who wants to know of no more reads it in no time.

        Args:
            path: The file to write.
            **added: Metadata that this file has not, its names without the architecture in front.
        """
        fields = [
            *self._outline,
            *(
                _string(f"{self.architecture}.{key}") + struct.pack("<II", GGUFValueType.UINT32, value)
                for key, value in added.items()
            ),
        ]
        names = (
            _string(name) + struct.pack("<IQIQ", 1, 1, GGMLQuantizationType.F32, 0) for name in self.tensors
        )
        counts = struct.pack("<IQQ", _VERSIONS[-1], len(self.tensors), len(fields))
        header = b"".join((_MAGIC, counts, *fields, *names))
        path.write_bytes(header.ljust(_rounded_up(len(header), self._alignment), b"\0") + bytes(4))

    @property
    def _alignment(self) -> int:
        alignment = self.fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its general.alignment is {alignment!r}")
        return alignment

    def _read_field(self, cursor: "_Cursor") -> None:
        begin = cursor.position
        key = cursor.string()
        (kind,) = cursor.unpack("I")
        start = cursor.position
        self.fields[key] = cursor.value(kind)
        raw = cursor.between(begin, cursor.position)
        if key.startswith("tokenizer.") and kind == GGUFValueType.ARRAY:
            # The kind of its entries, and that there are none.
            raw = raw[: start - begin + 4] + bytes(8)
        self._outline.append(raw)


class _Cursor:
    """A place in a file's header that moves on as it is read.

    Args:
        data: The file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        begin = self.position
        self.position += count
        return self.between(begin, self.position)

    def between(self, begin: int, end: int) -> bytes:
        """The bytes from one place to another."""
        if end > len(self._data):
            raise ValueError("it ends within its header")
        return self._data[begin:end]

    def unpack(self, form: str) -> tuple[Any, ...]:
        """The next numbers, little-endian, without padding."""
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self) -> str:
        """The next string."""
        (length,) = self.unpack("Q")
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        """The next value of a kind."""
        kind = GGUFValueType(kind)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.unpack(_SCALARS[kind])[0]
        entry, count = self.unpack("IQ")
        if entry in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[entry]}"))
        return [self.value(entry) for _ in range(count)]


def _read_tensor(cursor: _Cursor) -> GgufTensor:
    """An entry of the table of tensors; its offset counts from the first of them."""
    name = cursor.string()
    (dimensions,) = cursor.unpack("I")
    shape = cursor.unpack(f"{dimensions}Q")
    kind, offset = cursor.unpack("IQ")
    return GgufTensor(name, GGMLQuantizationType(kind), tuple(reversed(shape)), offset)


def _placed(tensor: GgufTensor, first: int, size: int) -> GgufTensor:
    placed = GgufTensor(tensor.name, tensor.kind, tensor.shape, first + tensor.offset)
    numbers, _ = GGML_QUANT_SIZES[tensor.kind]
    if tensor.shape and tensor.shape[-1] % numbers:
        raise ValueError(f"its tensor {tensor.name} has rows that do not fill blocks of {tensor.kind.name}")
    if placed.offset + placed.num_bytes > size:
        raise ValueError(f"it ends before the end of its tensor {tensor.name}")
    return placed


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _rounded_up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment

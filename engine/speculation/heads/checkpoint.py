"""The tensors of a head's checkpoint, as files hold them: read one by one, and never trusted.

A .bin or .pt file is a pickle, which may run anything: only its tensors are unpickled (torch's weights_only),
and whatever else it holds is refused.
"""

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelNotFound, StartupError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
MEDUSA_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHTS)

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class _File(Protocol):
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> torch.Tensor: ...


class Checkpoint:
    """Tensors by name.

    Args:
        what: What it is, for messages.
        places: Per name the file that holds the tensor, and its name there.
    """

    def __init__(self, what: str, places: Mapping[str, tuple[_File, str]]) -> None:
        self.what = what
        self._places = places

    @classmethod
    def open(cls, folder: Path, names: Iterable[str] = WEIGHTS) -> "Checkpoint":
        """The checkpoint in a folder.

        Args:
            folder: Where it is.
            names: Files it may be in, the first that is there is taken; whole, or with an index of several.

        Raises:
            ModelNotFound: None of them is there, or one that the index names is missing.
            StartupError: A file is damaged or holds something else.
        """
        for name in names:
            files = _files_of(folder, name)
            if files:
                opened = [_open(file) for file in files]
                break
        else:
            raise ModelNotFound(f"the folder {folder} holds no head: it has none of {', '.join(names)}")
        places: dict[str, tuple[_File, str]] = {}
        for file in opened:
            for tensor in file.shapes:
                if tensor in places:
                    raise StartupError(f"the head in {folder} has two tensors {tensor}")
                places[tensor] = (file, tensor)
        return cls(f"the head in {folder}", places)

    @property
    def names(self) -> frozenset[str]:
        """The tensors' names."""
        return frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        file, original = self._places[name]
        return file.shapes[original]

    def rows(self, name: str) -> int | None:
        """The first number of a tensor's shape, 0 for a single number; None if the tensor is not there."""
        if name not in self._places:
            return None
        shape = self.shape(name)
        return shape[0] if shape else 0

    def renamed(self, rename: Callable[[str], str | None]) -> "Checkpoint":
        """The same tensors by other names, without those whose new name is None.

        Raises:
            StartupError: Two tensors get one name.
        """
        places: dict[str, tuple[_File, str]] = {}
        for name, place in self._places.items():
            new = rename(name)
            if new is None:
                continue
            if new in places:
                raise StartupError(f"{self.what} has both {places[new][1]} and {place[1]}: one too many")
            places[new] = place
        return Checkpoint(self.what, places)

    def without(self, *names: str) -> "Checkpoint":
        """The same without some tensors, whether they are there or not."""
        return self.renamed(lambda name: None if name in names else name)

    def picking(self, names: Iterable[str], rows: torch.Tensor) -> "Checkpoint":
        """The same, but of some tensors only some rows.

        Args:
            names: The tensors.
            rows: int64 [num_rows], within the tensors.
        """
        places = dict(self._places)
        for name in names:
            file, original = places[name]
            places[name] = (_Rows(file, original, rows), original)
        return Checkpoint(self.what, places)

    def floats(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of weights, in memory of its own.

        Args:
            name: Its name.
            dtype: The type it should have.

        Raises:
            StartupError: It is damaged, of another kind, or has values that are not finite.
        """
        tensor = self._read(name)
        if tensor.dtype not in _FLOATS:
            raise StartupError(
                f"{name} of {self.what} is of type {_plain(tensor.dtype)}: weights must be float64, float32, "
                "float16 or bfloat16, not quantised"
            )
        # Fresh memory: what is read may be a map of the file, or a window of a larger storage.
        weights = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        if not torch.isfinite(weights).all():
            raise StartupError(f"{name} of {self.what} has values that are not finite in {_plain(dtype)}")
        return weights

    def integers(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers as int64, in memory of its own.

        Raises:
            StartupError: It is damaged or of another kind.
        """
        tensor = self._read(name)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
            raise StartupError(f"{name} of {self.what} must hold whole numbers, not {_plain(tensor.dtype)}")
        return torch.empty(tensor.shape, dtype=torch.int64).copy_(tensor)

    def _read(self, name: str) -> torch.Tensor:
        file, original = self._places[name]
        return file.read(original)


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="pt") as file:
                self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error

    def read(self, name: str) -> torch.Tensor:
        try:
            with safe_open(self._path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self._path, error) from error
        return tensor


class _TorchFile:
    def __init__(self, path: Path) -> None:
        self._tensors = _unpickled(path)
        for name, tensor in self._tensors.items():
            _check_plain(path, name, tensor)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class _Rows:
    """Some rows of one tensor of another file."""

    def __init__(self, file: _File, name: str, rows: torch.Tensor) -> None:
        self._file = file
        self._rows = rows
        self.shapes = {name: (len(rows), *file.shapes[name][1:])}

    def read(self, name: str) -> torch.Tensor:
        return self._file.read(name).index_select(0, self._rows)


def _files_of(folder: Path, name: str) -> list[Path]:
    """The files of a checkpoint of this name; none if it is not there."""
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        strays = [shard for shard in shards if Path(shard).name != shard]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} is no index of a checkpoint: {error!r}") from error
    if strays or not shards:
        raise StartupError(f"{index} must name files in its own folder, not {strays or 'none'}")
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ModelNotFound(f"the folder {folder} lacks {', '.join(missing)}, which {index.name} names")
    return [folder / shard for shard in shards]


def _open(path: Path) -> _File:
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped and _is_compressed(path):
            raise StartupError(f"{path} is compressed, which torch.save does not do: it is not read")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of what looks odd in a file: it fails, or is checked below.
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except StartupError:
        raise
    except pickle.UnpicklingError as error:
        raise StartupError(
            f"{path} holds more than tensors, or is damaged. A pickle can run any code, so nothing else in "
            f"it is read: {_first_line(error)}. Convert it to .safetensors where you trust it"
        ) from error
    except Exception as error:
        # Bytes that are no pickle can fail anywhere in the unpickler, with any error.
        raise _damaged(path, error) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise StartupError(f"{path} must hold tensors by name, not a {type(tensors).__name__}")
    return dict(tensors)


def _is_compressed(path: Path) -> bool:
    with zipfile.ZipFile(path) as file:
        return any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist())


def _check_plain(path: Path, name: str, tensor: object) -> None:
    """Refuses what is no ordinary tensor; a few bytes can pretend to be a tensor of any size."""
    if not isinstance(tensor, torch.Tensor):
        raise StartupError(f"{name} in {path} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise StartupError(f"{name} in {path} is no plain tensor but sparse, quantised or without values")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise StartupError(
            f"{name} in {path} is said to be {tuple(tensor.shape)}, but fewer values are there"
        )


def _damaged(path: Path, error: Exception) -> StartupError:
    return StartupError(f"{path} cannot be read, it is damaged or incomplete: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

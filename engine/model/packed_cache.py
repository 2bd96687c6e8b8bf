"""Packed models on disk: the next start reads them as they are, without ever holding the plain weights.

An entry is written after a model has been packed, and so after its fused layers have been held against
transformers' own forward pass; that trial is not made again for what is read from it.
"""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import transformers
from pydantic import TypeAdapter
from torch import nn
from transformers import PreTrainedModel

from engine.model import (
    few_bits,
    fused_layers,
    fusion,
    int8,
    kv_cache,
    linear,
    merging,
    packing,
    panel_linear,
    preparation,
    rounding,
    six_bits,
    streaming,
    tensor_file,
)
from engine.model.cpu_ops.build import CpuOperators
from engine.model.fusion import restore_fused_layers
from engine.model.merging import merge_groups
from engine.model.packing import LinearPacker, NarrowEmbedding, PackedLayer, restore_linear_layer
from engine.model.preparation import Recipe
from engine.model.tensor_file import DamagedFile, StoredTensor, TensorFile, write_tensors
from engine.model.weight_cache import WeightCache

logger = logging.getLogger(__name__)

# What decides how a packed model looks. A change of any of them makes all entries anew.
_MODULES = (
    *(
        few_bits,
        fused_layers,
        fusion,
        int8,
        kv_cache,
        linear,
        merging,
        packing,
        panel_linear,
        preparation,
        rounding,
        six_bits,
        streaming,
    ),
    tensor_file,
)
_HEADERS = ("few_bits.h", "int8.h", "panels.h", "six_bits.h", "six_steps.h", "steps.h")
_SOURCES = (
    Path(__file__),
    *(Path(cast("str", module.__file__)) for module in _MODULES),
    *(Path(__file__).parent / "cpu_ops" / name for name in _HEADERS),
)
_MODEL_FILES = (".safetensors", ".bin", ".json", ".py")
_INDEX, _TENSORS = "index.json", "tensors.bin"


@dataclass(frozen=True, slots=True)
class _Index:
    recipe: Recipe
    tensors: tuple[StoredTensor, ...]


_INDEX_ADAPTER = TypeAdapter(_Index)


def packed_key(model: str, folder: Path, wanted: str, dtype: str, operators: CpuOperators | None) -> str:
    """A key for a model that is packed in some way: equal keys mean equal tensors.

    Args:
        model: What it is called; the key begins with it.
        folder: Where its plain weights lie. Files count by size and time of change, since hashing gigabytes
            takes long.
        wanted: The setting of the type, which comes second.
        dtype: What it means here.
        operators: The C++ operators; with them layers are fused.
    """
    name = re.sub(r"[^\w.-]+", "-", Path(model).name)
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    parts = [dtype, str(operators is not None), torch.__version__, transformers.__version__]
    parts += [source.read_text("utf-8") for source in _SOURCES]
    for file in sorted(folder.iterdir()):
        if file.suffix in _MODEL_FILES:
            status = file.stat()
            parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{name}-{wanted}-{place}-{digest[:12]}"


class PackedCache:
    """Packed models in a folder.

    Args:
        folder: Where they are kept; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._cache = WeightCache(folder)

    def find(self, key: str) -> Path | None:
        """The entry of that key, if there is one."""
        return self._cache.get(key)

    def fill(
        self, key: str, module: PreTrainedModel, packer: LinearPacker, operators: CpuOperators | None
    ) -> Recipe | None:
        """Does to a model what was done to the stored one, and fills in its weights.

        Args:
            key: What `packed_key` gave.
            module: The model on the meta device, as transformers builds it. Where the answer is None it is
                spoilt.
            packer: What packed the layers.
            operators: The C++ operators, if they were there when it was stored.

        Returns:
            What was done; None, with the reason in the log, where the entry is damaged. It is removed then.
        """
        entry = self._cache.folder / key
        try:
            index = _read_index(entry / _INDEX)
            with closing(TensorFile(entry / _TENSORS, index.tensors)) as file:
                _restore(module, index.recipe, file, packer, operators)
        except (OSError, DamagedFile) as error:
            logger.warning("the packed weights in %s cannot be used and are made anew: %s", entry, error)
            self._remove(key)
            return None
        logger.info("packed weights read from %s", entry)
        return index.recipe

    def store(self, key: str, module: PreTrainedModel, recipe: Recipe) -> None:
        """Keeps a packed model for the next start, in the place of older versions of it.

        A disk that is full costs the next start its time and nothing else: it is said in the log.

        Args:
            key: What `packed_key` gave.
            module: The model.
            recipe: What `prepare` did to it.
        """

        def write(folder: Path) -> None:
            tensors = write_tensors(folder / _TENSORS, _tensors(module, recipe))
            _write_index(folder / _INDEX, _Index(recipe, tensors))

        try:
            entry = self._cache.put(key, write)
        except OSError as error:
            logger.warning(
                "the packed weights cannot be kept, so that the next start packs them again: %s", error
            )
            return
        logger.info("packed weights kept in %s", entry)
        source = key.rpartition("-")[0]
        for older in self._cache.folder.glob(f"{source}-*"):
            if older.name != key:
                logger.info("removing %s, packed from an older version", older)
                self._remove(older.name)

    def _remove(self, key: str) -> None:
        try:
            self._cache.drop(key)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", self._cache.folder / key, error)


def _write_index(path: Path, index: _Index) -> None:
    """One line with the checksum of the next, which is the index."""
    data = _INDEX_ADAPTER.dump_json(index)
    path.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def _read_index(path: Path) -> _Index:
    checksum, _, data = path.read_bytes().partition(b"\n")
    if hashlib.sha256(data).hexdigest().encode() != checksum:
        raise DamagedFile(f"{path} is damaged")
    return _INDEX_ADAPTER.validate_json(data)


def _tensors(module: nn.Module, recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a model holds, packed layers first."""
    for path in recipe.packed:
        layer = cast("PackedLayer", module.get_submodule(path))
        for name, tensor in layer.stored().items():
            yield f"{path}.{name}", tensor
    for path, part in module.named_modules():
        if path not in recipe.packed:
            own = (*part.named_parameters(path, recurse=False), *part.named_buffers(path, recurse=False))
            yield from ((name, tensor.detach()) for name, tensor in own)


def _restore(
    module: PreTrainedModel,
    recipe: Recipe,
    file: TensorFile,
    packer: LinearPacker,
    operators: CpuOperators | None,
) -> None:
    if operators is not None:
        restore_fused_layers(module, recipe.fused, operators)
    merge_groups(module)
    packed = {path: file.names(f"{path}.") for path in recipe.packed}
    for path, names in packed.items():
        stored = {name.removeprefix(f"{path}."): file.read(name) for name in names}
        restore_linear_layer(module, path, packer, stored)
    for path in recipe.narrowed:
        module.set_submodule(path, NarrowEmbedding(torch.empty(0, device="meta")))
    done = {name for names in packed.values() for name in names}
    for name in file.names():
        if name not in done:
            _assign(module, name, file.read(name))
    if missing := _without_values(module):
        raise DamagedFile(f"{missing[0]} is not there, nor are {len(missing) - 1} others")


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    part = module.get_submodule(path)
    if attribute in dict(part.named_parameters(recurse=False)):
        setattr(part, attribute, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(part, attribute, tensor)


def _without_values(module: nn.Module) -> list[str]:
    return [
        f"{path}.{name}"
        for path, part in module.named_modules()
        for name, value in (*part._parameters.items(), *part._buffers.items(), *vars(part).items())
        if isinstance(value, torch.Tensor) and value.is_meta
    ]

"""Weights out of a GGUF file into safetensors files, a tensor at a time.

What a tensor is called and how it lies in a model of transformers is transformers' own to say; but its loader
of GGUF files holds a whole model in float32.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from engine.errors import StartupError
from engine.model.gguf_file import GgufFile
from engine.model.pages import return_freed_memory

logger = logging.getLogger(__name__)

_EXACT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_WEIGHTS = "model.safetensors"
_SHARD_BYTES = 1 << 28
_AT_A_TIME = 1 << 20
_BLOCK = re.compile(r"blk\.(\d+)\.")


def write_weights(source: GgufFile, module: PreTrainedModel, folder: Path) -> None:
    """Writes the weights of a model.

    Quantised matrices are stored as float16, which rounds them by at most 1/2048 of their value, far below
    their own quantisation step; everything else is stored exactly.

    Args:
        source: The file.
        module: The model as transformers builds it, its weights on the meta device.
        folder: Where they go, as model.safetensors or in shards with an index.

    Raises:
        StartupError: Some are missing, or do not fit the model, or are stored in a way that is not known.
        OSError: The folder takes no more.
    """
    left = _wanted(module)
    shards = _Shards(folder)
    try:
        for name, tensor in _Reader(source, module).weights():
            if (shape := left.pop(name, None)) is None:
                continue
            if tensor.shape != shape:
                raise StartupError(
                    f"{source.path} has {name} in the shape {tuple(tensor.shape)}, and its metadata makes it "
                    f"{tuple(shape)}"
                )
            shards.add(name, tensor)
    except ValueError as error:
        raise StartupError(f"{source.path} cannot be read as a GGUF model: {error}") from error
    if left:
        missing = sorted(left)
        raise StartupError(
            f"{source.path} lacks the weights {', '.join(missing[:5])} ({len(missing)} in all)"
        )
    shards.finish()
    return_freed_memory()


def _wanted(module: PreTrainedModel) -> dict[str, torch.Size]:
    """The shapes of a model's weights; one that is tied to another goes by the other's name."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {
        name: weight.shape for name, weight in state.items() if first.setdefault(id(weight), name) == name
    }


class _Reader:
    """Reads weights as transformers has them.

    Args:
        source: The file.
        module: The model.
    """

    def __init__(self, source: GgufFile, module: PreTrainedModel) -> None:
        self._source = source
        kind = TENSOR_PROCESSORS.get(source.architecture, TensorProcessor)
        self._processor = kind(config=module.config.to_dict())
        self._names = get_gguf_hf_weights_map(_Level(module), self._processor)
        self._quantised = any(tensor.kind not in _EXACT_TYPES for tensor in source.tensors.values())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of the file that the model has a name for."""
        done, total = 0, len(self._source.tensors)
        for _, block in groupby(sorted(self._source.tensors, key=_block), key=_block):
            # Some processors put together what a file has in parts, all of them within a layer.
            merged: dict[str, torch.Tensor] = {}
            for name in block:
                yield from self._read(name, merged)
                done += 1
                if done * 10 // total > (done - 1) * 10 // total:
                    logger.info("converted %d of %d tensors", done, total)
            for name in list(merged):
                yield name, _narrowed(merged.pop(name), self._quantised)

    def _read(self, name: str, merged: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """A tensor under its new name, if it does not become a part of a merged one."""
        result = self._processor.process(
            weights=self._source.read(name),
            name=name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": merged},
        )
        if result.name not in self._names:
            return []
        tensor = torch.from_numpy(np.ascontiguousarray(result.weights))
        return [(self._names[result.name], _narrowed(tensor, self._quantised))]


def _block(name: str) -> int:
    """The layer that a tensor belongs to; -1 if it is outside of them."""
    found = _BLOCK.match(name)
    return -1 if found is None else int(found[1])


class _Level:
    """A module as transformers' map of names looks at it, but only down to its children.

    It looks at every module in turn, since some models are in the file without their outermost part. That is
    all it finds below the first level, and takes seconds.

    Args:
        module: A model, or a child of one.
        levels: How far down.
    """

    def __init__(self, module: nn.Module, levels: int = 1) -> None:
        self._module = module
        self._levels = levels

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config."""
        config: PreTrainedConfig = self._module.config
        return config

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Its weights by name."""
        weights: dict[str, torch.Tensor] = self._module.state_dict()
        return weights

    def named_children(self) -> list[tuple[str, "_Level"]]:
        """Its children."""
        children = self._module.named_children() if self._levels else ()
        return [(name, _Level(child, self._levels - 1)) for name, child in children]


def _narrowed(tensor: torch.Tensor, quantised: bool) -> torch.Tensor:
    """The smallest type that holds the tensor exactly, or float16 for a matrix out of a quantised file."""
    pieces = torch.split(tensor.view(-1), _AT_A_TIME)
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(piece.to(dtype).float(), piece) for piece in pieces):
            return tensor.to(dtype)
    if quantised and tensor.ndim > 1:
        low, high = tensor.aminmax()
        if max(-low.item(), high.item()) <= torch.finfo(torch.float16).max:
            return tensor.half()
    return tensor


@dataclass(slots=True)
class _Shards:
    """Writes tensors into files of a bounded size, as they come.

    Attributes:
        folder: Where the files go.
    """

    folder: Path
    _files: list[tuple[Path, list[str]]] = field(default_factory=list)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor."""
        self._held[name] = tensor
        if sum(tensor.nbytes for tensor in self._held.values()) >= _SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        """Writes what is left, and what Hugging Face folders have to find it by."""
        self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self.folder / _WEIGHTS)
            return
        places: dict[str, str] = {}
        for number, (file, names) in enumerate(self._files, 1):
            final = file.rename(self.folder / f"model-{number:05}-of-{len(self._files):05}.safetensors")
            places |= dict.fromkeys(names, final.name)
        index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
        (self.folder / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=2), "utf-8")

    def _write(self) -> None:
        if self._held:
            file = self.folder / f"{len(self._files)}.safetensors"
            try:
                save_file(self._held, file, metadata={"format": "pt"})
            except SafetensorError as error:  # What it makes of a disk that is full.
                raise OSError(str(error)) from error
            self._files.append((file, list(self._held)))
            self._held.clear()

"""Packs a model part by part, so that its float32 weights are never in memory together.

checkpoint ─▶ embedding and head ─▶ layer 0 ─▶ layer 1 ─▶ …      transformers' attention: run, freed
                                ╰─▶ layer 0 ─▶ layer 1 ─▶ …      ours: fused, run, packed ─▶ logits compared

A model's own forward pass draws its layers through memory: hooks read each one before it is called and free
it afterwards. So the trial of `preparation`, which holds the model on a paged cache against transformers'
own forward pass, is made here as it is made of a model that is in memory as a whole.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from engine.model.attention.choice import choose_backend
from engine.model.checkpoint import Checkpoint
from engine.model.cpu_ops.build import CpuOperators
from engine.model.fusion import FusedPart, fuse_paths, log_fused
from engine.model.kv_cache import LayerShape
from engine.model.outline import NotStreamable, Outline
from engine.model.packing import (
    LinearPacker,
    largest_magnitude,
    log_packed,
    narrow_embeddings,
    pack_within,
)
from engine.model.pages import return_freed_memory
from engine.model.preparation import Recipe, check_finite, not_finite, probe
from engine.model.self_check import Trial, check_logits, paged_logits_in_one_pass, run_trial
from engine.model.weight_type import WeightPlan, unfit_weight

logger = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 4096
_RETURN_AFTER = 1 << 28
"""Bytes that are read before what they leave in the allocator is given back to the system."""


def probe_bare(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Does what `probe` does to a model that is on the meta device as a whole.

    Raises:
        NotStreamable: Its forward pass needs values.
        ModelNotSupported: It cannot run on a paged KV cache.
    """
    try:
        return probe(module)
    except RuntimeError as error:
        raise NotStreamable(f"it does not run without weights ({error})") from error


def prepare_by_parts(
    module: PreTrainedModel,
    shapes: tuple[LayerShape, ...],
    found: Outline,
    checkpoint: Checkpoint,
    plan: WeightPlan,
    operators: CpuOperators | None,
) -> Recipe:
    """Does what `prepare` does to a model without weights, and fills it from its checkpoint meanwhile.

    Args:
        module: A model in evaluation mode, set to ATTENTION_NAME, its weights on the meta device and what it
            computes for itself on the CPU. Where an error is raised it is spoilt.
        shapes: Cache shape of each attention layer.
        found: Where its parts are.
        checkpoint: Its weights.
        plan: How they are to be held, packed.
        operators: The C++ operators, if there are any.

    Returns:
        What was done.

    Raises:
        NotStreamable: Its forward pass needs more than one layer at a time.
        DamagedFile: Its weights cannot be read.
        ModelNotSupported: It cannot run on a paged KV cache.
        StartupError: A layer cannot be held as asked, or the model gives no numbers.
    """
    assert plan.packer is not None, "there is something to pack"
    stream = _Stream(module, found, checkpoint, plan.packer, plan.strict, operators)
    order = {name: place for place, (name, _) in enumerate(module.named_modules())}
    stream.read_outside()
    narrowed = narrow_embeddings(module)
    _widen_embeddings(module)
    head = stream.pack_head()
    try:
        trial = stream.try_plain()
        check_finite(module, trial)
        logits = stream.try_packing(shapes, [0, 0] if trial is None else trial.tokens)
    except RuntimeError as error:
        raise NotStreamable(f"it does not run with one layer at a time in memory ({error})") from error
    if trial is not None:
        check_logits(module, logits, trial)
    module.set_submodule(found.head, head)
    if left := [name for name, weight in module.named_parameters() if weight.is_meta]:
        raise NotStreamable(f"{left[0]} takes no part in its forward pass")
    fused = sorted(stream.fused, key=lambda part: order[part.path])
    log_fused(fused)
    log_packed(module, stream.packed)
    return Recipe(shapes, tuple(fused), _largest_first(module, stream.packed), narrowed)


def _largest_first(module: nn.Module, packed: dict[str, int]) -> tuple[str, ...]:
    """The order of `pack_linear_layers`."""
    names = [name for name, _ in module.named_modules() if name in packed]
    return tuple(sorted(names, key=lambda name: -packed[name]))


def _widen_embeddings(module: nn.Module) -> None:
    """Holds embeddings in float32 that cannot be held in 16 bits, or do more than look up."""
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.weight.dtype != torch.float32:
            part.weight = _parameter(part.weight.float())


@dataclass(slots=True)
class _Stream:
    """A model whose layers come and go."""

    module: PreTrainedModel
    found: Outline
    checkpoint: Checkpoint
    packer: LinearPacker
    strict: bool
    operators: CpuOperators | None
    fused: list[FusedPart] = field(default_factory=list)
    packed: dict[str, int] = field(default_factory=dict)
    _done: int = 0
    _unreturned: int = 0

    def read_outside(self) -> None:
        """Reads what belongs neither to a layer nor to the head; embeddings in the type of the checkpoint."""
        for path, part in self.module.named_modules():
            if not self.found.in_layers(f"{path}.") and path != self.found.head:
                self._read_own(path, part, as_stored=type(part) is nn.Embedding)

    def pack_head(self) -> nn.Module:
        """Packs the head; in its place stands one that reads its rows whenever it is called.

        Returns:
            The packed head, or the plain one where the packer refuses it.
        """
        name, source = self.found.head, self.found.head_weight
        head = self.module.get_submodule(name)
        assert isinstance(head, nn.Linear)
        head.weight = _parameter(self.checkpoint.read(source))
        if head.bias is not None:
            head.bias = _parameter(self.checkpoint.read(f"{name}.bias").float())
        if not math.isfinite(largest_magnitude(head.weight)):
            raise not_finite(self.module, source)
        stand_in = _HeadInPieces(self.checkpoint, source, head.bias)
        self.packed |= pack_within(self.module, name, self.packer, strict=self.strict)
        if name not in self.packed:
            head.weight = _parameter(head.weight.float())
        result: nn.Module = self.module.get_submodule(name)
        self.module.set_submodule(name, stand_in)
        return result

    def try_plain(self) -> Trial | None:
        """Runs the trial of transformers' own forward pass."""
        logger.info("running the model on transformers' attention, one layer in memory at a time")
        with self._hooks(self._read, self._free):
            return run_trial(self.module)

    def try_packing(self, shapes: tuple[LayerShape, ...], tokens: list[int]) -> torch.Tensor:
        """Runs tokens on a paged cache through layers that are fused before, and packed afterwards.

        Returns:
            float32 [len(tokens), rows of the head].
        """
        if self.operators is not None:
            outside = [name for name, _ in self.module.named_modules() if name]
            outside = [name for name in outside if not self.found.in_layers(name)]
            self.fused += fuse_paths(self.module, outside, self.operators)
        backend = choose_backend(self.operators, torch.device("cpu"))
        with self._hooks(self._read_fused, self._pack):
            return paged_logits_in_one_pass(self.module, shapes, backend, tokens)

    @contextmanager
    def _hooks(self, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
        handles: list[Any] = []
        for index, layer in enumerate(self.module.get_submodule(self.found.layers).children()):
            name = f"{self.found.layers}.{index}"
            handles.append(layer.register_forward_pre_hook(partial(before, name)))
            handles.append(layer.register_forward_hook(partial(after, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # What stays in the model is not to be made in inference mode, which the passes are in.

    @torch.inference_mode(False)
    def _read(self, name: str, layer: nn.Module, _args: object) -> None:
        for path, part in layer.named_modules(prefix=name):
            self._read_own(path, part)

    @torch.inference_mode(False)
    def _read_fused(self, name: str, layer: nn.Module, args: object) -> None:
        self._read(name, layer, args)
        if self.operators is not None:
            paths = [path for path, _ in layer.named_modules(prefix=name)]
            self.fused += fuse_paths(self.module, paths, self.operators)

    @torch.inference_mode(False)
    def _free(self, name: str, layer: nn.Module, _args: object, output: object) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        finite = isinstance(hidden, torch.Tensor) and bool(hidden.isfinite().all())
        if not finite and (unfit := unfit_weight(layer)) is not None:
            raise not_finite(self.module, f"{name}.{unfit}")
        for part in layer.modules():
            for own, weight in list(part.named_parameters(recurse=False)):
                setattr(part, own, _parameter(torch.empty(weight.shape, device="meta")))
        self._return_memory()

    @torch.inference_mode(False)
    def _pack(self, name: str, _layer: nn.Module, _args: object, _output: object) -> None:
        self.packed |= pack_within(self.module, name, self.packer, strict=self.strict)
        self._return_memory()
        self._done += 1
        total = len(list(self.module.get_submodule(self.found.layers).children()))
        if self._done * 10 // total > (self._done - 1) * 10 // total:
            logger.info("packed %d of %d layers", self._done, total)

    def _read_own(self, path: str, part: nn.Module, *, as_stored: bool = False) -> None:
        """Reads a module's own weights, and what it keeps besides them."""
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, old in own:
            if name in part._non_persistent_buffers_set:
                continue
            value = self.checkpoint.read(f"{path}.{name}" if path else name)
            value = value if as_stored else value.float()
            self._unreturned += value.nbytes
            setattr(part, name, _parameter(value) if isinstance(old, nn.Parameter) else value)

    def _return_memory(self) -> None:
        if self._unreturned >= _RETURN_AFTER:
            return_freed_memory()
            self._unreturned = 0


class _HeadInPieces(nn.Module):
    """An output layer that is read from its file, a piece at a time, whenever it is called.

    Args:
        checkpoint: Where it is.
        weight: The name of its weight.
        bias: float32 [rows] or None.
    """

    def __init__(self, checkpoint: Checkpoint, weight: str, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._name = weight
        # In a tuple, so that it is no parameter: it belongs to the packed head.
        self._bias = (None if bias is None else bias.detach(),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""
        rows = self._checkpoint.weights[self._name].shape[0]
        # The last layer has left memory behind that is free, and its result is the largest of all.
        return_freed_memory()
        result = x.new_empty((*x.shape[:-1], rows))
        for begin in range(0, rows, _ROWS_AT_A_TIME):
            end = min(begin + _ROWS_AT_A_TIME, rows)
            weight = self._checkpoint.rows(self._name, begin, end)
            result[..., begin:end] = functional.linear(x, weight.float())
        [bias] = self._bias
        return result if bias is None else result + bias


def _parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=False)

"""What a model has to look like to be packed part by part (`streaming`), and where its parts are."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from engine.model.checkpoint import Checkpoint
from engine.model.hidden_states import decoder_layers


class NotStreamable(Exception):
    """A model cannot be packed part by part; the message says why."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Where the parts of a model are, by name.

    Attributes:
        layers: The list of decoder layers.
        head: The output layer.
        head_weight: Its weight in the checkpoint; the embedding's, where the two are one.
    """

    layers: str
    head: str
    head_weight: str

    def in_layers(self, name: str) -> bool:
        """Whether a module or a weight belongs to a decoder layer."""
        return name.startswith(f"{self.layers}.")


def check_folder(folder: Path, config: PreTrainedConfig) -> None:
    """Asks a folder for what transformers would read besides, or instead of, model.safetensors.

    Raises:
        NotStreamable: There is such a thing.
    """
    if (folder / "adapter_config.json").is_file():
        raise NotStreamable("its folder holds an adapter")
    if named := getattr(config, "transformers_weights", None):
        raise NotStreamable(f"its config says that its weights are in {named}")


def outline(module: PreTrainedModel, checkpoint: Checkpoint) -> Outline:
    """Finds a model's parts.

    Args:
        module: The model as transformers builds it, its weights on the meta device.
        checkpoint: Its weights.

    Raises:
        NotStreamable: It has other parts, or its weights are stored in another way than it holds them.
    """
    layers, _ = decoder_layers(module)
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if not layers or type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        raise NotStreamable("its decoder layers, its embedding or its head cannot be told apart")
    if get_model_conversion_mapping(module, add_legacy=False):
        raise NotStreamable("transformers rearranges the weights of its checkpoints")
    names = {id(part): name for name, part in module.named_modules()}
    tied = head.weight is embedding.weight
    source = names[id(embedding if tied else head)]
    found = Outline(layers, names[id(head)], f"{source}.weight")
    if tied and f"{found.head}.weight" in checkpoint.weights:
        raise NotStreamable("its head and its embedding are one, but both are in its checkpoint")
    _check_parts(module, found)
    _check_weights(module, found, checkpoint)
    return found


def _check_parts(module: PreTrainedModel, found: Outline) -> None:
    for name, part in module.named_modules():
        inside = found.in_layers(name)
        if isinstance(part, nn.Embedding) and inside:
            raise NotStreamable(f"it has an embedding inside a decoder layer, {name}")
        if isinstance(part, nn.Linear | Conv1D) and not inside and name != found.head:
            raise NotStreamable(f"it has a linear layer outside of its decoder layers, {name}")


def _check_weights(module: PreTrainedModel, found: Outline, checkpoint: Checkpoint) -> None:
    owners: dict[int, str] = {}
    for name, weight in _stored(module):
        other = owners.setdefault(id(weight), name)
        is_tied_head = name == f"{found.head}.weight" and other == found.head_weight
        if other != name and not is_tied_head:
            raise NotStreamable(f"{name} and {other} are one")
        stored = checkpoint.weights.get(found.head_weight if is_tied_head else name)
        if stored is None or stored.shape != tuple(weight.shape) or weight.dtype != torch.float32:
            raise NotStreamable(f"its checkpoint holds no {name} that could be taken as it is")


def _stored(module: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint has to hold, by every name that it goes by."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield name, buffer

"""What a Hugging Face model folder has to hold."""

import json
from collections.abc import Sequence
from pathlib import Path

MODEL_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def is_model_folder(path: Path) -> bool:
    """Whether the folder describes a Hugging Face model."""
    return (path / "config.json").is_file()


def missing_weights(folder: Path, names: Sequence[str] = MODEL_WEIGHTS) -> list[str]:
    """Files without which the folder's model cannot be loaded; empty if all are there.

    Args:
        folder: The folder.
        names: Files that its weights may be in, any of which will do.
    """
    if not is_model_folder(folder):
        return ["config.json"]
    if any((folder / name).is_file() for name in names):
        return []
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return sorted(shard for shard in shards if not (folder / shard).is_file())
    return [f"weights ({' or '.join(names)}, whole or with an index)"]

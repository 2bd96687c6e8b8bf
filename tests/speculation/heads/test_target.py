"""What a head has to know of its target, from configs of several makes."""

from dataclasses import astuple

import pytest
from transformers import AutoConfig

from engine.speculation.heads.target import TargetShape

_SIZES = {"hidden_size": 32, "num_hidden_layers": 7, "num_attention_heads": 4, "vocab_size": 99}


@pytest.mark.parametrize(
    ("arch", "fields", "shape"),
    [
        ("llama", {**_SIZES, "tie_word_embeddings": True}, (32, 99, 7, True)),
        ("llama", {**_SIZES, "tie_word_embeddings": False}, (32, 99, 7, False)),
        ("gpt2", {"n_embd": 32, "n_layer": 7, "n_head": 4, "vocab_size": 99}, (32, 99, 7, True)),
        ("gemma3", {"text_config": {"model_type": "gemma3_text", **_SIZES}}, (32, 99, 7, True)),
    ],
)
def test_a_targets_shape(arch: str, fields: dict[str, object], shape: tuple[object, ...]) -> None:
    assert astuple(TargetShape.of(AutoConfig.for_model(arch, **fields))) == shape

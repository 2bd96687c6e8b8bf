"""What is set aside for graphs, against what recordings of tiny models hold."""

import importlib.util

import pytest
import torch
from torch import nn

from engine.model.graph_memory import recorded_bytes
from engine.model.quantizing import quantize
from engine.model.static_batch import LARGEST, Bucket, num_buckets
from tests.tiny import VOCAB_SIZE, tiny_model

MIB = 1 << 20
FIXED = 33 * 8 * MIB + 32 * MIB
"""What 33 graphs and cuBLAS take, whatever is computed."""


def test_every_bucket_counts() -> None:
    """Those that a batch can be padded to."""
    buckets = {
        Bucket(num_tokens, num_sequences)
        for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128)
        for num_sequences in (1, 2, 4, 8, 16, 32)
        if num_sequences <= num_tokens
    }
    assert num_buckets() == len(buckets) == 33
    assert LARGEST in buckets


def test_logits_and_the_widest_layer_count() -> None:
    """A tiny model in float32: 259 logits as given, as float32 and kept; eight tensors of 48 numbers."""
    per_token = VOCAB_SIZE * (4 + 4 + 4) + 8 * 48 * 4
    assert recorded_bytes(tiny_model(), VOCAB_SIZE, torch.float32) == FIXED + 128 * per_token


def test_each_kind_of_pass_has_recordings_of_its_own() -> None:
    module, dtype = nn.Linear(64, 256), torch.bfloat16
    one, two = (recorded_bytes(module, 1000, dtype, num_kinds) for num_kinds in (1, 2))
    assert two - one == 33 * 8 * MIB


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_a_layer_that_is_unpacked_counts() -> None:
    linear = nn.Linear(64, 256, dtype=torch.bfloat16).requires_grad_(False)
    plain = recorded_bytes(linear, 1000, torch.bfloat16)
    quantize(linear, "int8")
    assert recorded_bytes(linear, 1000, torch.bfloat16) == plain + 64 * 256 * 2

"""What is left to recordings of tiny models."""

import torch

from engine.graph_reserve import reserved_bytes, sampling_bytes
from engine.model.graph_memory import recorded_bytes
from engine.model.model_runner import ROW_LIMITS
from engine.speculation.growing import DRAWING_LIMITS
from engine.speculation.loaded_head import wrap_medusa
from engine.speculation.medusa_runner import recorded_heads_bytes
from tests.engines import load_tiny
from tests.heads import random_medusa
from tests.tiny import VOCAB_SIZE

MIB = 1 << 20


def test_sampling_takes_its_rows_and_what_is_alive() -> None:
    """A small vocabulary at once; a large one so many rows at a time that the rest stays the same."""
    assert sampling_bytes(VOCAB_SIZE, ROW_LIMITS) == 128 * VOCAB_SIZE * (3 * 4 + 8 * 8) + 24 * 8 * MIB
    large = 128256
    assert sampling_bytes(large, ROW_LIMITS) == 128 * large * 3 * 4 + 8 * 8 * (2 * MIB) + 24 * 8 * MIB


def test_every_model_counts() -> None:
    target = load_tiny("llama")
    plain = reserved_bytes(target, ())
    assert plain == recorded_bytes(target.module, VOCAB_SIZE, torch.float32) + sampling_bytes(
        VOCAB_SIZE, ROW_LIMITS
    )
    with_draft = reserved_bytes(target, [target])
    drawing = sampling_bytes(VOCAB_SIZE, DRAWING_LIMITS)
    assert with_draft - plain == recorded_bytes(target.module, VOCAB_SIZE, torch.float32) + drawing
    medusa = wrap_medusa(random_medusa(), target, name="tiny")
    # Passes with hidden states are recorded beside those without.
    kinds = recorded_bytes(target.module, VOCAB_SIZE, torch.float32, 2) - recorded_bytes(
        target.module, VOCAB_SIZE, torch.float32
    )
    assert reserved_bytes(target, [medusa]) - plain - drawing == kinds + recorded_heads_bytes(
        medusa.heads, VOCAB_SIZE, torch.float32
    )

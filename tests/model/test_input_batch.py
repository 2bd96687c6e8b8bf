"""How a batch reaches a device."""

from dataclasses import fields

import torch

from engine.model.input_batch import InputBatch
from tests.model.attention_steps import BLOCK_SIZE, mixed

CPU = torch.device("cpu")


def test_a_batch_moves_in_one_copy_and_stays_what_it_was() -> None:
    batch = InputBatch.build(mixed(), BLOCK_SIZE, CPU)
    moved = batch.to(torch.device("cpu", 0))  # Another device by name, so that it is copied.
    pieces = []
    assert moved.spans == batch.spans
    tensors = {field.name for field in fields(InputBatch)} - {"spans", "context"}
    for name in (*tensors, "context_slots", "context_positions"):
        before, after = getattr(batch, name), getattr(moved, name)
        if isinstance(before, torch.Tensor):
            before, after = (before,), (after,)
        assert len(after) == len(before) > 0
        assert all(map(torch.equal, after, before)), name
        pieces.extend(after)
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1


def test_a_batch_that_is_there_is_not_copied() -> None:
    batch = InputBatch.build(mixed(), BLOCK_SIZE, CPU)
    assert batch.to(CPU) is batch

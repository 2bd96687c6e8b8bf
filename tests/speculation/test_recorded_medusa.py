"""Medusa heads' recorded passes against the same passes launched anew; a tape stands in for CUDA graphs."""

from typing import Any

import pytest
import torch

from engine.model import row_graphs
from engine.model.recording import Results
from engine.speculation import medusa_runner
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.medusa_runner import MOST_ROWS, MedusaRunner, recorded_heads_bytes
from engine.speculation.target_ends import TargetEnds
from tests.heads import DRAFT_IDS, HIDDEN, random_medusa
from tests.model.tape import TapeRecorder
from tests.tiny import VOCAB_SIZE, tiny_model

COUNTS = (3, 4, 3, 2, 33, 1, 4)
"""Requests of each pass: with the padded sizes 4, 2 and 1, and one that is too many."""
HEADS: dict[str, dict[str, Any]] = {
    "a vocabulary of their own": {},
    "one layer for all": {"shared_lm_head": True},
    "the target's layer": {"draft_vocab_size": None},
}


@torch.inference_mode()
def assert_replays(heads: MedusaHeads, tapes: TapeRecorder) -> None:
    """Each size is tried once; all passes that fit are replayed, but the first of a size for comparison."""
    ends = TargetEnds(tiny_model(), VOCAB_SIZE)
    plain, recorded = MedusaRunner(heads, ends), MedusaRunner(heads, ends, tapes)
    generator = torch.Generator().manual_seed(2)
    for index, count in enumerate(COUNTS):
        states = torch.randn(count, HIDDEN, generator=generator)
        got, expected = recorded.forward(states), plain.forward(states)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=f"pass {index} differs")
    assert (len(tapes.tapes), tapes.num_replays) == (3, 6)


@pytest.mark.parametrize("kind", HEADS)
def test_replayed_passes_are_what_passes_are(kind: str) -> None:
    assert_replays(random_medusa(**HEADS[kind]), TapeRecorder())


def test_states_of_another_pass_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would see recorded passes that read what the first one was given."""
    fill = row_graphs.RowGraphs._fill
    filled: dict[int, list[torch.Tensor]] = {}

    def stale(graphs: row_graphs.RowGraphs, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return filled.get(len(inputs[0])) or filled.setdefault(len(inputs[0]), fill(graphs, inputs))

    monkeypatch.setattr(row_graphs.RowGraphs, "_fill", stale)
    with pytest.raises(AssertionError, match="pass 2 differs"):
        assert_replays(random_medusa(), TapeRecorder())


def test_heads_that_do_not_replay_are_launched_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a recording says something else than the pass did, the pass stands, and the log tells."""
    passes = iter(range(10))
    run = medusa_runner.MedusaRunner._pass

    def other(runner: MedusaRunner, states: torch.Tensor) -> Results:
        [logits] = run(runner, states)
        # The first is launched, the second warms up, the third is recorded.
        return (logits if next(passes) != 2 else logits + logits.abs().max(),)

    monkeypatch.setattr(medusa_runner.MedusaRunner, "_pass", other)
    tapes = TapeRecorder()
    runner = MedusaRunner(random_medusa(), TargetEnds(tiny_model(), VOCAB_SIZE), tapes)
    states = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
    first, second = (runner.forward(states) for _ in range(2))
    assert torch.equal(first, second)
    assert tapes.num_replays == 1
    assert "are not replayed from a graph: results differed by" in caplog.text


def test_what_they_take_is_set_aside() -> None:
    """Of 32 requests at most each head's state and logits, in sizes of powers of two."""
    heads = random_medusa(num_heads=3)
    per_row = 3 * (2 * 4 * (HIDDEN + len(DRAFT_IDS)) + 8 * len(DRAFT_IDS))
    assert MOST_ROWS == 32
    assert recorded_heads_bytes(heads, len(DRAFT_IDS), torch.float32) == 32 * per_row + (6 * 8 + 32 << 20)

"""What the pool of keys and values leaves to the recordings of an engine's models on a GPU."""

from collections.abc import Sequence

from engine.model.graph_memory import recorded_bytes, row_graphs_bytes
from engine.model.loaded_model import LoadedModel
from engine.model.model_runner import ROW_LIMITS
from engine.sampling.device_rows import live_bytes
from engine.speculation.factory import Draft
from engine.speculation.growing import DRAWING_LIMITS
from engine.speculation.loaded_head import LoadedEagle
from engine.speculation.medusa_runner import recorded_heads_bytes


def reserved_bytes(target: LoadedModel, drafts: Sequence[Draft]) -> int:
    """The memory of all recordings at most: passes of all models, and what samples from their rows."""
    # Heads read hidden states of the target, whose passes then come with them and without.
    num_kinds = 1 if all(isinstance(draft, LoadedModel) for draft in drafts) else 2
    total = recorded_bytes(target.module, target.vocab_size, target.dtype, num_kinds)
    total += sampling_bytes(target.vocab_size, ROW_LIMITS)
    for draft in drafts:
        total += sampling_bytes(target.vocab_size, DRAWING_LIMITS)
        if isinstance(draft, LoadedModel):
            total += recorded_bytes(draft.module, draft.vocab_size, draft.dtype)
        elif isinstance(draft, LoadedEagle):
            total += recorded_bytes(draft.head, target.vocab_size, draft.dtype)
        else:
            total += recorded_heads_bytes(draft.heads, target.vocab_size, draft.dtype)
    return total


def sampling_bytes(vocab_size: int, limits: tuple[int, int]) -> int:
    """What recordings of sampling take: of so many rows at most, and so many of them."""
    num_rows, num_recordings = limits
    # Each row where recordings read it, as it is put together and as a result, in float32.
    bytes_per_row = 3 * 4 * vocab_size
    return row_graphs_bytes(num_rows, bytes_per_row, num_recordings) + live_bytes(num_rows, vocab_size)

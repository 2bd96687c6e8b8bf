"""Whether draft heads say on a GPU what they say on a CPU, recorded passes included."""

import torch

from engine.model.attention.interface import AttentionBackend
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.triton import TritonAttention
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.speculation.head_runner import HeadRunner
from engine.speculation.heads.config import EagleFamily
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.medusa_runner import MedusaRunner
from engine.speculation.target_ends import TargetEnds
from tests.gpu.agreement import LOGITS_TOLERANCE, SPLIT, CountingRecorder, Finding
from tests.heads import FAMILIES, HIDDEN, eagle_config, random_eagle, random_medusa
from tests.model.attention_steps import BLOCK_SIZE, TREE, tables
from tests.tiny import VOCAB_SIZE, tiny_model


def head_findings(device: torch.device) -> list[Finding]:
    """Tiny random heads in float32: a text, then a tree."""
    return [_finding(family, device) for family in FAMILIES]


def _finding(family: EagleFamily, device: torch.device) -> Finding:
    expected = _logits(random_eagle(eagle_config(family)), ReferenceAttention(), torch.device("cpu"))
    recorder = CountingRecorder(device) if device.type == "cuda" else None
    got = _logits(random_eagle(eagle_config(family)), TritonAttention(SPLIT, recorder), device, repeats=3)
    error = float((got - expected).abs().max() / expected.abs().max())
    fault = "" if error <= LOGITS_TOLERANCE else f"{error:.2g} of the largest logit"
    # Each of the two passes is tried once and then replayed twice.
    if not fault and recorder is not None and recorder.num_replays != 6:
        fault = f"{recorder.num_replays} replays instead of 6; the log says why"
    return Finding(f"a head of {family}", fault)


@torch.inference_mode()
def _logits(
    head: EagleHead, backend: AttentionBackend, device: torch.device, repeats: int = 1
) -> torch.Tensor:
    """Float32 on the CPU; the last of some repetitions."""
    config = head.config
    shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
    [table] = tables(1)
    cache = PagedKVCache([shape] * config.num_layers, len(table), BLOCK_SIZE, torch.float32, device)
    ends = TargetEnds(tiny_model().to(device), VOCAB_SIZE)
    runner = HeadRunner(head.to(device), cache, backend, ends)
    generator = torch.Generator()
    rows: list[torch.Tensor] = []
    for _ in range(repeats):
        generator.manual_seed(3)
        passes = (
            SequenceSlice([(7 * place) % 250 for place in range(11)], 1, table, rows=2),
            SequenceSlice([], 12, table, TREE, rows=len(TREE)),
        )
        rows = [
            runner.extend([piece], torch.randn(len(piece), HIDDEN, generator=generator).to(device)).logits
            for piece in passes
        ]
    return torch.cat(rows).cpu()


@torch.inference_mode()
def medusa_findings(device: torch.device) -> list[Finding]:
    """Tiny random Medusa heads in float32, of three requests."""
    states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = MedusaRunner(random_medusa(), TargetEnds(tiny_model(), VOCAB_SIZE)).forward(states)
    recorder = CountingRecorder(device) if device.type == "cuda" else None
    runner = MedusaRunner(
        random_medusa().to(device), TargetEnds(tiny_model().to(device), VOCAB_SIZE), recorder
    )
    for _ in range(3):
        got = runner.forward(states.to(device)).cpu()
    error = float((got - expected).abs().max() / expected.abs().max())
    fault = "" if error <= LOGITS_TOLERANCE else f"{error:.2g} of the largest logit"
    # Tried once and then replayed twice.
    if not fault and recorder is not None and recorder.num_replays != 3:
        fault = f"{recorder.num_replays} replays instead of 3; the log says why"
    return [Finding("Medusa heads", fault)]

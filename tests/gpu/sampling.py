"""Whether rows are sampled on a GPU as on a CPU, and recorded as launched one by one."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.model.row_graphs import RowGraphs
from engine.sampling.choosing import choose_tokens
from engine.sampling.device_rows import DeviceRows
from engine.sampling.logits import process_logits
from engine.sampling.noise import Stream, gumbel_noise
from engine.sampling.row_group import RowGroup
from engine.sampling_params import SamplingParams
from tests.gpu.agreement import CountingRecorder, Finding

VOCAB = 32000
NUM_ROWS = 64
MOST_DIFFERENT = 1
"""Rows whose token may be another: last bits that differ on a GPU, at a border or a near-tie."""
OPTIONS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=40, min_p=0.01),
    SamplingParams(temperature=0.9, top_p=0.95),
)


def sampling_findings(device: torch.device) -> list[Finding]:
    """Random rows, some greedy, some drawn with all options, as a target and as a draft; also replayed."""
    rows = 4 * torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(7))
    groups = [
        RowGroup(replace(OPTIONS[place % 4], seed=place), (1, 2, 3), 3, frozenset())
        for place in range(NUM_ROWS)
    ]
    keys = [key for group in groups for key in group.noise_keys(Stream.TARGET)]
    processed = process_logits(rows, groups)
    scores = processed.double()
    drawn = [place for place, key in enumerate(keys) if key is not None]
    scores[drawn] += gumbel_noise([key for key in keys if key is not None], VOCAB, rows.device)
    expected = torch.cat([choose_tokens(processed, keys)[:, None], scores.topk(2).indices], dim=1)
    there = rows.to(device)
    anew = _tokens(DeviceRows(), there, groups)
    findings = [_finding("sampling", anew, expected, MOST_DIFFERENT)]
    if device.type == "cuda":
        recorder = CountingRecorder(device)
        recorded = DeviceRows(RowGraphs(recorder, NUM_ROWS, 8))
        for _ in range(3):
            replayed = _tokens(recorded, there, groups)
        findings.append(_finding("sampling, replayed", replayed, anew, 0))
        # Options, choice and ranking are each tried once and then replayed twice.
        if recorder.num_replays != 9:
            findings.append(Finding("sampling, replayed", f"{recorder.num_replays} replays instead of 9"))
    return findings


def _tokens(far: DeviceRows, rows: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
    keys = [key for group in groups for key in group.noise_keys(Stream.TARGET)]
    processed = far.process(rows, groups)
    chosen = far.choose(processed, keys).cpu()
    # The two likeliest under their noise, as drafts are drawn; the first of them is the choice.
    return torch.cat([chosen[:, None], far.rank(processed, keys, 2).tokens], dim=1)


def _finding(name: str, got: torch.Tensor, expected: torch.Tensor, most: int) -> Finding:
    count = int((got != expected).any(dim=1).sum())
    return Finding(name, "" if count <= most else f"{count} of {len(got)} rows have other tokens")

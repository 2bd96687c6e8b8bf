"""The sampler for devices that it takes long to hear from: one copy a step, and the very same verdicts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.sampling import sampler
from engine.sampling.device_rows import DeviceRows
from engine.sampling.noise import Stream
from engine.sampling.sampler import Sampler, SamplingTask
from engine.sampling_params import SamplingParams, SpeculationParams
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree
from tests.sampling.table_model import (
    BLOCK,
    DRAFT,
    MIXED,
    MODEL,
    PROMPT,
    REJECTION,
    TYPICAL,
    Line,
    drawn_trees,
    model_chain,
    random_trees,
    tasks_of,
)
from tests.sampling.waits import waits_in

OPTIONS = SamplingParams(
    seed=7,
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    min_tokens=5,
    stop_token_ids=(4,),
    logit_bias=((3, 1.5),),
    bad_words=((5,), (1, 6)),
    allowed_token_ids=tuple(range(11)),
)


LARGE = 3000
"""Ids: more than top_p looks at on a CPU before it sorts whole rows."""


def drawn_tasks(
    speculation: SpeculationParams, widths: Sequence[int], proposal: Proposal
) -> list[SamplingTask]:
    params = SamplingParams(temperature=0.9, speculation=speculation)
    lines = [Line(replace(params, seed=seed)) for seed in range(40)]
    return tasks_of(lines, drawn_trees(DRAFT, widths, proposal))


def matched_tasks() -> list[SamplingTask]:
    lines = [Line(line.params, (*PROMPT, place)) for place, line in enumerate([*MIXED, Line(OPTIONS)])]
    return tasks_of(lines, random_trees) + tasks_of(lines, model_chain(DRAFT, Stream.TARGET))


TASKS = {
    "match": matched_tasks(),
    "rejection": drawn_tasks(REJECTION, (1, 1, 1), Proposal.SAMPLED),
    "multi-step": drawn_tasks(REJECTION, (3, 2), Proposal.SAMPLED),
    "recursive": drawn_tasks(REJECTION, (3, 2, 1), Proposal.SAMPLED_DISTINCT),
    "block": drawn_tasks(BLOCK, (1, 1, 1, 1), Proposal.SAMPLED),
    "typical": drawn_tasks(TYPICAL, (2, 2), Proposal.SAMPLED_DISTINCT),
}
TASKS["all together"] = [task for tasks in list(TASKS.values()) for task in tasks[::3]]
EVERY = pytest.mark.parametrize("tasks", TASKS.values(), ids=TASKS)


@EVERY
def test_the_verdicts_are_those_of_a_walk_by_levels(tasks: list[SamplingTask]) -> None:
    rows = MODEL.rows(tasks)
    runs = Sampler(far=DeviceRows())(rows, tasks)
    assert runs == Sampler()(rows, tasks)
    assert len({len(run.accepted_nodes) for run in runs}) > 1


@EVERY
def test_a_step_waits_once(tasks: list[SamplingTask]) -> None:
    rows = MODEL.rows(tasks)
    assert waits_in(lambda: Sampler(far=DeviceRows())(rows, tasks)) == ["tolist"]


PLAIN = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(seed=1), "all options": OPTIONS}


@pytest.mark.parametrize("params", PLAIN.values(), ids=PLAIN)
def test_a_step_without_drafts_waits_once(params: SamplingParams) -> None:
    tasks = [Line(params).task(), Line(params, (*PROMPT, 8)).task()]
    rows = MODEL.rows(tasks)
    assert waits_in(lambda: Sampler(far=DeviceRows())(rows, tasks)) == ["tolist"]


def test_what_waits_is_counted() -> None:
    """By levels a sampled chain that stands takes a copy for each."""
    line = Line(SamplingParams(seed=3))
    (plain,) = tasks_of([line], model_chain(MODEL, Stream.TARGET))
    rows = MODEL.rows([plain])
    assert waits_in(lambda: Sampler()(rows, [plain])) == ["tolist"] * 4
    tensor = torch.arange(4)
    kinds = (
        lambda: tensor[0].item(),
        lambda: bool(tensor[1]),
        lambda: float(tensor[1]),
        lambda: tensor[tensor > 1],
        lambda: tensor.nonzero(),
        lambda: tensor.cpu(),
        lambda: tensor.numpy(),
    )
    assert [len(waits_in(kind)) for kind in kinds] == [1] * len(kinds)


def device_tasks() -> list[SamplingTask]:
    """All rules, with laws on a device without numbers."""
    tree = TokenTree((5, 6, 7), (0, 0, 1))
    law = torch.empty(LARGE, device="meta")
    drawn = replace(tree, proposal=Proposal.SAMPLED_DISTINCT, distributions=(law,) * 3)
    chain = TokenTree.chain((5, 6), Proposal.SAMPLED, (law,) * 2)
    sampled = SamplingParams(seed=1, top_p=0.999)
    return [
        Line(OPTIONS).task(tree),
        Line(SamplingParams(temperature=0.0)).task(tree),
        Line(replace(sampled, speculation=REJECTION)).task(drawn),
        Line(replace(sampled, speculation=BLOCK)).task(chain),
        Line(replace(sampled, speculation=TYPICAL)).task(tree),
        Line(sampled).task(EMPTY_TREE),
    ]


def test_nothing_is_known_on_the_host_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there are no numbers: whoever looks at one fails."""
    copied: list[tuple[int, int]] = []

    def to_host(tokens: torch.Tensor, chances: Sequence[torch.Tensor]) -> list[float]:
        assert tokens.device.type == "meta"
        copied.append((len(tokens), len(chances)))
        return [0.0] * (len(tokens) + len(chances))

    monkeypatch.setattr(sampler, "_to_host", to_host)
    tasks = device_tasks()
    num_rows = sum(1 + len(task.tree) for task in tasks)
    runs = Sampler(far=DeviceRows())(torch.empty(num_rows, LARGE, device="meta"), tasks)
    assert copied == [(num_rows, 3 + 2 + 3)]
    assert [run.token_ids for run in runs] == [(0,)] * len(tasks)

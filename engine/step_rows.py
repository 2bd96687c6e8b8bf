"""StepRows: which rows of the target's pass a step needs, and whose they are."""

import torch

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import SchedulerOutput
from engine.model.input_batch import SequenceSlice
from engine.model.model_runner import ModelRunner
from engine.prompt_logprobs import PromptLogprobs
from engine.sampling.device_rows import DeviceRows
from engine.sampling.sampler import Sampler, SamplingTask
from engine.sampling.uploading import upload


class StepRows:
    """Lays a plan out for the target, and hands the rows that come of it to who wants them.

    Args:
        kv: Knows the block tables.
        prompt_logprobs: Gets the rows of prompts whose logprobs are asked for.
        eos_token_ids: Ids that end the model's turn.
    """

    def __init__(
        self, kv: KVCacheManager, prompt_logprobs: PromptLogprobs, eos_token_ids: frozenset[int]
    ) -> None:
        self._kv = kv
        self._prompt_logprobs = prompt_logprobs
        self._eos_token_ids = eos_token_ids

    def slices(self, plan: SchedulerOutput) -> list[SequenceSlice]:
        """What the target computes, in the plan's order."""
        slices = []
        for item in plan.scheduled:
            request, start = item.request, item.request.num_computed_tokens
            rows = 1 + len(item.tree) if item.reaches_end else 0
            if self._prompt_logprobs.wants(item):
                rows = item.num_tokens + len(item.tree)
            tokens = request.token_ids[start : start + item.num_tokens]
            slices.append(SequenceSlice(tokens, start, self._kv.block_table(request), item.tree, rows))
        return slices

    def tasks(self, plan: SchedulerOutput, rows: torch.Tensor) -> tuple[list[SamplingTask], torch.Tensor]:
        """What is to be sampled, for those that have come to their last token, and from which rows.

        Args:
            plan: The step.
            rows: [num_rows, vocab_size], those of each item in the plan's order.
        """
        tasks: list[SamplingTask] = []
        wanted: list[int] = []
        place = 0
        for item in plan.scheduled:
            request = item.request
            if self._prompt_logprobs.wants(item):
                self._prompt_logprobs.collect(item, rows[place : place + item.num_tokens])
                place += item.num_tokens - item.reaches_end
            if item.reaches_end:
                begin, place = place, place + 1 + len(item.tree)
                wanted.extend(range(begin, place))
                known = (request.token_ids, request.num_prompt_tokens)
                tasks.append(
                    SamplingTask(request.params, *known, item.tree, self._eos_token_ids, request.matcher)
                )
        if len(wanted) == len(rows):
            return tasks, rows
        return tasks, rows.index_select(0, upload(wanted, torch.int64, rows.device))


def sampler_of(runner: ModelRunner) -> Sampler:
    """What samples a model's rows where they are."""
    if runner.device.type == "cpu":
        return Sampler(runner.operators)
    return Sampler(far=DeviceRows(runner.row_graphs))

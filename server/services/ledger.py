"""Counts what a call has used, while its outputs come in."""

from collections.abc import Sequence

from engine.acceptance import is_lossless
from engine.outputs import RequestOutput, SpeculationStats
from engine.sampling_params import Acceptance
from server.protocol.usage import CompletionTokensDetails, PromptTokensDetails, SpeculationReport, Usage
from server.services.generation import Choice, ChoiceOutput


class Ledger:
    """The latest totals of each choice of a call.

    Args:
        choices: All of them; at least one.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._num_choices = len(choices)
        self._params = choices[0].params
        self._latest: dict[int, RequestOutput] = {}
        self._first_of_prompt: dict[int, int] = {}
        self._num_finished = 0

    def add(self, item: ChoiceOutput) -> None:
        """Takes one output in."""
        choice = item.choice
        self._latest[choice.index] = item.output
        if choice.params.choice == 0:
            self._first_of_prompt[choice.prompt_index] = choice.index
        self._num_finished += item.output.finish_reason is not None

    @property
    def complete(self) -> bool:
        """Whether every choice has finished."""
        return self._num_finished == self._num_choices

    @property
    def usage(self) -> Usage:
        """Tokens read and written; a prompt counts once, as its first choice found it in the cache."""
        prompts = [self._latest[index] for index in self._first_of_prompt.values()]
        num_prompt = sum(output.num_prompt_tokens for output in prompts)
        num_output = sum(output.num_output_tokens for output in self._latest.values())
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(output.num_cached_tokens for output in prompts)
            ),
            completion_tokens_details=self._predictions,
        )

    @property
    def speculation(self) -> SpeculationReport:
        """What speculation did, over all choices."""
        stats = self._speculation
        return SpeculationReport(
            steps=stats.num_steps,
            drafts=stats.num_drafts,
            drafted_tokens=stats.num_draft_tokens,
            accepted_tokens=stats.num_accepted_tokens,
            tokens_per_forward=stats.num_committed_tokens / stats.num_steps if stats.num_steps else None,
            acceptance=self._params.speculation.acceptance or Acceptance.MATCH,
            lossless=is_lossless(self._params),
        )

    @property
    def _predictions(self) -> CompletionTokensDetails:
        """What became of predictions; what an answer does not have yet is not rejected before its end."""
        each = [(output.speculation, output.finish_reason) for output in self._latest.values()]
        return CompletionTokensDetails(
            accepted_prediction_tokens=sum(stats.num_found_tokens for stats, _ in each),
            rejected_prediction_tokens=sum(
                stats.num_predicted_tokens - stats.num_found_tokens for stats, reason in each if reason
            ),
        )

    @property
    def _speculation(self) -> SpeculationStats:
        each = [output.speculation for output in self._latest.values()]
        return SpeculationStats(
            num_steps=sum(stats.num_steps for stats in each),
            num_drafts=sum(stats.num_drafts for stats in each),
            num_draft_tokens=sum(stats.num_draft_tokens for stats in each),
            num_accepted_tokens=sum(stats.num_accepted_tokens for stats in each),
            num_committed_tokens=sum(stats.num_committed_tokens for stats in each),
        )

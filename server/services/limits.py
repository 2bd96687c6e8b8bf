"""What one call may ask for."""

from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the operator sets.

    Attributes:
        max_logprobs: Alternatives per token.
        max_choices: Answers per call: prompts times n.
        max_prompt_logprobs: Log probabilities of prompts per call, the likeliest tokens' included: some
            megabytes of answer.
    """

    max_logprobs: int
    max_choices: int
    max_prompt_logprobs: int = 1 << 16

    def check_choices(self, count: int, param: str) -> None:
        """Refuses a call that asks for too many answers.

        Raises:
            InvalidRequest: It does.
        """
        if count > self.max_choices:
            raise InvalidRequest(
                f"one request may ask for {self.max_choices} answers (prompts times n), got {count}; "
                "send several requests",
                param,
            )

    def check_prompt_logprobs(self, params: SamplingParams, num_tokens: int) -> None:
        """Refuses a call that asks for too many log probabilities of prompts.

        Args:
            params: How many at each place.
            num_tokens: Tokens of all prompts, as often as they are reported.

        Raises:
            InvalidRequest: It does.
        """
        if params.prompt_logprobs is None:
            return
        count = num_tokens * (1 + params.prompt_logprobs)
        if count > self.max_prompt_logprobs:
            raise InvalidRequest(
                f"prompt_logprobs of {num_tokens} tokens with {params.prompt_logprobs} others each are "
                f"{count} log probabilities; one request may ask for {self.max_prompt_logprobs}: lower the "
                "number or shorten the prompt",
                "prompt_logprobs",
            )

"""What one call may ask for."""

from dataclasses import dataclass

from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the operator sets.

    Attributes:
        max_logprobs: Alternatives per token.
        max_choices: Answers per call: prompts times n.
    """

    max_logprobs: int
    max_choices: int

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

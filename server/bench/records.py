"""What is known of one request, and what follows from it."""

from collections.abc import Iterable
from dataclasses import dataclass

from server.bench.statistics import apportion, token_gaps


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What a server says of its speculation.

    Attributes:
        drafted: Draft tokens checked.
        accepted: Those that became part of the answer.
        steps: Forward passes of the target that brought tokens; None where the server does not say.
    """

    drafted: int
    accepted: int
    steps: int | None


@dataclass(frozen=True, slots=True)
class Record:
    """One request, failed or not. Times are in seconds.

    Attributes:
        prompt: The prompt's name.
        kind: What it is about.
        sent: When it was sent, from the beginning of the run.
        late: How long after its due time that was.
        seconds: From sending to the end of the answer, or to the error.
        arrivals: When each chunk with text came, from sending.
        lengths: Characters of those chunks.
        text: The answer.
        finish_reason: Why it ended, as the server says.
        num_prompt_tokens: From usage; None where the server sends none.
        num_cached_tokens: Prompt tokens out of the prefix cache, from usage.
        num_output_tokens: From usage; None where the server sends none.
        drafts: What speculation did; None where the server does not say.
        error: Why it failed; None if it did not.
    """

    prompt: str
    kind: str
    sent: float
    late: float
    seconds: float
    arrivals: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    drafts: DraftCounts | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: from usage, else one per chunk."""
        return len(self.arrivals) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def tokens_per_chunk(self) -> list[int]:
        """Tokens of each chunk with text, guessed from its characters where they are not one each."""
        return apportion(self.num_tokens, self.lengths)

    @property
    def ttft(self) -> float | None:
        """Time to the first text; None if there was none."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies; tokens of one chunk share its wait."""
        return token_gaps(self.arrivals, self.tokens_per_chunk)

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first chunk; None for an answer of one chunk."""
        if len(self.arrivals) < 2:
            return None
        rest = self.num_tokens - self.tokens_per_chunk[0]
        return (self.arrivals[-1] - self.arrivals[0]) / rest if rest > 0 else None

    @property
    def seconds_per_token(self) -> float | None:
        """The whole answer's time over its tokens, reading the prompt included."""
        return self.seconds / self.num_tokens if self.num_tokens else None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What speculation did over many answers.

    Attributes:
        drafted: Draft tokens checked.
        accepted: Those that stood.
        steps: Forward passes of the target; None if a server did not say.
        tokens: Tokens of those answers.
    """

    drafted: int
    accepted: int
    steps: int | None
    tokens: int

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Acceptance | None":
        """The sum over the answers whose server reports it; None if none does."""
        told = [(record.drafts, record.num_tokens) for record in records if record.drafts is not None]
        if not told:
            return None
        steps = [drafts.steps for drafts, _ in told if drafts.steps is not None]
        return cls(
            drafted=sum(drafts.drafted for drafts, _ in told),
            accepted=sum(drafts.accepted for drafts, _ in told),
            steps=sum(steps) if len(steps) == len(told) else None,
            tokens=sum(tokens for _, tokens in told),
        )

    @property
    def rate(self) -> float | None:
        """Accepted over drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens of an answer per forward pass of the target."""
        return self.tokens / self.steps if self.steps else None

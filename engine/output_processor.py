"""OutputProcessor: what a committed run means as text, and where a stop string cuts it."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.stopping import Stop
from engine.detokenizer import Detokenizer, StopStringMatcher
from engine.errors import InvalidRequest
from engine.outputs import FinishReason, TokenLogprob, TopLogprob
from engine.sampling.logprobs import RowLogprobs
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Processed:
    """What stands of a run, and what it says.

    Attributes:
        num_kept: Leading tokens of the run that stand; those behind a stop string do not.
        text: New text. On the last run also what was held back.
        finish_reason: Set if the answer ends with this run.
        stop_reason: The stop string or stop id that ended it, if one of those did.
    """

    num_kept: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputProcessor:
    """The texts of all live requests.

    A step calls it between the stop rules on ids and the scheduler's update, so that what lies behind a stop
    string is dropped before anything counts, caches or streams it.

    Args:
        tokenizer: The model's; without one every text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}

    def add(self, request_id: str, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Begins an answer.

        Raises:
            InvalidRequest: Stop strings are asked for, but there is no tokenizer to make text.
        """
        if self._tokenizer is None and params.stop:
            raise InvalidRequest(
                "stop needs text, and this engine has no tokenizer: use stop_token_ids", "stop"
            )
        assert request_id not in self._answers, f"request {request_id} was added twice"
        self._answers[request_id] = _Answer(self._tokenizer, params, prompt_token_ids)

    def process(self, request_id: str, run: Sequence[int], stop: Stop) -> Processed:
        """Takes the next run of an answer, token by token.

        Args:
            request_id: Whose.
            run: The tokens a step committed.
            stop: The stop rules' verdict on them.
        """
        return self._answers[request_id].extend(run, stop)

    def finish(self, request_id: str) -> str:
        """Ends an answer from outside (abort, error): the text that was held back. Empty if it had ended."""
        return self._answers[request_id].finish()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, for messages."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if self._tokenizer else ""

    def remove(self, request_id: str) -> None:
        """Forgets an answer; unknown ids are no error, since a request may end before it was added."""
        self._answers.pop(request_id, None)

    def logprobs(self, row: RowLogprobs) -> TokenLogprob:
        """A token's logprobs with their texts and bytes."""
        top = tuple(
            TopLogprob(token_id, self._text(token_id), self._bytes(token_id), logprob)
            for token_id, logprob in row.top
        )
        return TokenLogprob(
            row.token_id, self._text(row.token_id), self._bytes(row.token_id), row.logprob, top, row.rank
        )

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._tokenizer else ""

    def _bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if self._tokenizer else b""


class _Answer:
    """The text of one request so far."""

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._detokenizer = tokenizer and Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=params.shown_token_ids,
        )
        self._matcher = StopStringMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._num_tokens = 0
        self._ended = False

    def extend(self, run: Sequence[int], stop: Stop) -> Processed:
        pieces: list[str] = []
        num_shown = stop.num_kept - self._hides_last(stop)
        for index, token_id in enumerate(run[:num_shown]):
            text = self._detokenizer.push(token_id) if self._detokenizer else ""
            # As with an EOS, min_tokens tokens come before the first one that may stop.
            matched = self._matcher.push(text, may_stop=self._num_tokens >= self._params.min_tokens)
            self._num_tokens += 1
            pieces.append(matched.text)
            if matched.stop is not None:
                self._ended = True
                return Processed(index + 1, "".join(pieces), FinishReason.STOP, matched.stop)
        if stop.reason is not None:
            pieces.append(self.finish())
        return Processed(stop.num_kept, "".join(pieces), stop.reason, stop.stop_token)

    def finish(self) -> str:
        if self._ended:
            return ""
        self._ended = True
        return self._matcher.finish() + (self._detokenizer.finish() if self._detokenizer else "")

    def _hides_last(self, stop: Stop) -> bool:
        """Whether the token that stops is kept out of the text: a marker, not something said."""
        if stop.reason is not FinishReason.STOP or not self._params.skip_special_tokens:
            return False
        return stop.stop_token is None or not self._params.include_stop_str_in_output

"""POST /v1/completions: request, answer and chunk."""

from typing import ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.sampling_params import MAX_LOGPROBS
from server.protocol.base import GenerationRequest
from server.protocol.fields import PredictionOrText, Prompts
from server.protocol.refused import REFUSED_IN_COMPLETIONS, RefusedField
from server.protocol.usage import (
    Answer,
    FinishReasonField,
    PromptLogprobsField,
    PromptTokenIdsField,
    StopReasonField,
    TokenIdsField,
)


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_COMPLETIONS

    prompt: Prompts = Field(
        description="A text, several texts, token ids, or several lists of token ids. Choice "
        "number prompt * n + i is the i-th answer to a prompt."
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens to generate at most; default: 16, or min_tokens if that is more, or fewer where "
        "the context ends. 0 only reads the prompt, for echo.",
    )
    prediction: PredictionOrText = Field(
        "",
        description="A text that much of the answer will be the same as, behind any of the prompts; as text "
        "or in chat's form. It makes the answer faster and does not change it.",
        json_schema_extra={"default": None},
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report the log probability of each token and of this many likeliest ones; 0: of the "
        "chosen token alone.",
    )
    suffix: str = Field(
        "",
        description="What follows the text that is wanted, for models that fill in the middle, such as "
        "Qwen2.5-Coder, StarCoder, Code Llama and DeepSeek-Coder; with prompts that are texts.",
    )
    echo: bool = Field(
        False, description="Put the prompt in front of the answer, with its logprobs if asked."
    )
    best_of: int | None = Field(None, ge=1, description="Must equal n: there is no ranking of answers.")

    @model_validator(mode="after")
    def _a_gap_in_a_text(self) -> Self:
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise PydanticCustomError(
                "suffix", "{field} needs prompts that are texts, not token ids", {"field": "suffix"}
            )
        if self.suffix and self.echo:
            raise PydanticCustomError(
                "echo", "{field} cannot be had with suffix; leave one of them out", {"field": "echo"}
            )
        return self

    @model_validator(mode="after")
    def _all_are_best(self) -> Self:
        if self.best_of not in (None, self.n):
            raise PydanticCustomError(
                "best_of",
                "{field} must equal n ({n}), got {best_of}: answers are not ranked",
                {"field": "best_of", "n": self.n, "best_of": str(self.best_of)[:40]},
            )
        return self


class CompletionLogprobs(BaseModel):
    """Logprobs in the format of OpenAI's completions: parallel lists, an entry per token."""

    tokens: list[str] = Field(description='Texts; a token that is no whole character reads "bytes:\\\\x..".')
    token_logprobs: list[float | None] = Field(description="null for the first token of a prompt.")
    top_logprobs: list[dict[str, float] | None] | None = Field(
        description="The likeliest tokens and the chosen one; null if logprobs is 0."
    )
    text_offset: list[int] = Field(description="Where in the choice's text each token begins.")


class CompletionChoice(BaseModel):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonField
    stop_reason: StopReasonField
    token_ids: TokenIdsField = None
    prompt_token_ids: PromptTokenIdsField = None
    prompt_logprobs: PromptLogprobsField = None


class Completion(Answer):
    """The answer; streamed, the same with what is new."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]

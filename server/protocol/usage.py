"""The numbers that come with an answer."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

FinishReasonField = Annotated[
    Literal["stop", "length"] | None,
    Field(description="stop: the model or a stop ended it. length: the limit or the context did."),
]
ChatFinishReasonField = Annotated[
    Literal["stop", "length", "tool_calls"] | None,
    Field(
        description="stop: the model or a stop ended it. length: the limit or the context did. "
        "tool_calls: as stop, and the model wants something called."
    ),
]
StopReasonField = Annotated[
    str | int | None,
    Field(description="The stop string or stop token id that ended it, if one did."),
]

TokenIdsField = Annotated[
    list[int] | None, Field(description="The answer's token ids, or those new in a chunk; if asked for.")
]
PromptTokenIdsField = Annotated[
    list[int] | None,
    Field(description="The prompt's token ids, in a stream with the first chunk; if asked for."),
]


class PromptLogprob(BaseModel):
    """What the model thought of a token at its place in the prompt."""

    logprob: float = Field(description="Its log probability, the model's own.")
    rank: int = Field(description="Its place among all tokens, the likeliest being 1.")
    decoded_token: str = Field(description="Its text, with U+FFFD where it is no whole character.")


PromptLogprobsField = Annotated[
    list[dict[str, PromptLogprob] | None] | None,
    Field(
        description="Per token of the prompt: the token's id and those of the likeliest ones; null for the "
        "first, which nothing predicted. In a stream with the first chunk; if asked for."
    ),
]


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int = Field(description="Prompt tokens that the prefix cache supplied.")


class CompletionTokensDetails(BaseModel):
    """What became of the request's prediction, over all choices; 0 without one."""

    accepted_prediction_tokens: int = Field(description="Tokens of the prediction that the answer has.")
    rejected_prediction_tokens: int = Field(
        description="Those that a finished answer does not have; they are not among completion_tokens."
    )


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int = Field(description="Tokens of the prompts, each prompt counted once whatever n is.")
    completion_tokens: int = Field(description="Tokens of the answers, over all choices.")
    total_tokens: int = Field(description="The sum of both.")
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculationReport(BaseModel):
    """What speculation did for this call, summed over its choices."""

    steps: int = Field(description="Forward passes of the target that brought tokens.")
    drafts: int = Field(description="Those among them that had a draft to check.")
    drafted_tokens: int = Field(description="Draft tokens checked.")
    accepted_tokens: int = Field(description="Draft tokens that became part of the answer.")
    tokens_per_forward: float | None = Field(
        description="Tokens of the answer per forward pass; null when there was none."
    )
    acceptance: str = Field(description="The rule that draft tokens were accepted by.")
    lossless: bool = Field(
        description="Whether the answer has the model's own distribution: false under typical acceptance at "
        "a temperature above 0."
    )


class Answer(BaseModel):
    """What every answer and every chunk has."""

    id: str = Field(description="Names this answer; all its chunks have the same.")
    object: str
    created: int = Field(description="Unix time of the request.")
    model: str = Field(description="The model's name, as the request spelt it.")
    system_fingerprint: str = Field(description="Names the server's version and model.")
    choices: Sequence[BaseModel]
    usage: Usage | None = Field(
        None, description="Streamed: in the last chunk, if stream_options.include_usage is set."
    )
    speculation: SpeculationReport | None = Field(
        None,
        description="Streamed: in the usage chunk, or without one in the chunk that ends the last choice.",
    )

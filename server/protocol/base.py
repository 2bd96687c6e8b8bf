"""What the requests of the endpoints that generate have in common."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.sampling_params import MAX_DRAFT_TOKENS, MAX_LOGPROBS, SEED_MAX, SEED_MIN
from server.protocol.fields import LogitBias, StopStrings
from server.protocol.formats import ResponseFormat, StructuredOutputs
from server.protocol.model import RequestModel

MAX_CHOICES = 128


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool = Field(
        False, description="Send the usage in one more chunk, without choices, before [DONE]."
    )
    continuous_usage_stats: bool = Field(
        False, description="Send the usage so far in every chunk; needs include_usage."
    )


class SpeculationOptions(RequestModel):
    """One request's say in its speculation; unknown keys are refused.

    The text is the same whatever is set here, but for three acceptance rules at a temperature above 0:
    rejection and block keep the distribution and not the text, typical keeps neither.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, values: object) -> object:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                nearest = get_close_matches(key, cls.model_fields, n=1)
                hint = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(cls.model_fields)}"
                raise PydanticCustomError(
                    "unknown_key", "speculation has no {field}; {hint}", {"field": key[:40], "hint": hint}
                )
        return values

    enabled: bool = Field(True, description="false decodes this request plainly.")
    num_draft_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="Draft tokens per step; default: the server's setting.",
    )
    acceptance: Literal["match", "rejection", "block", "typical"] | None = Field(
        None,
        description="match: the text is a function of prompt, parameters and seed alone. rejection: the "
        "ratio rule of Leviathan et al. 2023, for drafts that are drawn; block: its form for whole chains by "
        "Sun et al. 2024; the text of a seed then depends on the draft, the distribution does not. typical: "
        "Medusa's, lossy, where the server allows it. Default: the server's setting, match if it has none.",
    )


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What an endpoint calls some of its fields, for errors about them.

    Attributes:
        prompt: What is to be continued.
        max_tokens: The limit of the answer.
        response_format: What the answer's text must be.
    """

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    response_format: str = "response_format"


class SamplingRequest(RequestModel):
    """The fields of all endpoints that generate.

    Keys beyond an endpoint's own are kept by name, to be listed as ignored.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def ignored_fields(self) -> list[str]:
        """Keys that are no fields, and that do not ask for what is refused by name."""
        understood = {field.name for field in self.refused_fields}
        return [key for key in self.model_extra or () if key not in understood]

    model: str | None = Field(
        None, description="A name that /v1/models lists; default: the model that is served."
    )
    temperature: float = Field(
        1.0, ge=0, le=2, description="0 takes the most likely token, always; 1 samples the model's law."
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the likeliest tokens that together have this probability."
    )
    top_k: int = Field(0, ge=-1, description="Sample from this many likeliest tokens; 0 and -1 are off.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Leave out tokens less likely than this share of the likeliest."
    )
    stop: StopStrings = Field(
        (), description="Up to 4 strings that end the answer; the text is cut before the first of them."
    )
    seed: int | None = Field(
        None,
        ge=SEED_MIN,
        le=SEED_MAX,
        description="The same seed gives the same text, in any batch, with speculation or without; "
        "the n answers differ. Default: drawn at random, once per prompt.",
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted from the logits of tokens that the answer already has."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="The same, times how often the answer has the token."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="Divides the logits of tokens in prompt and answer (Hugging Face's); 1 is off."
    )
    logit_bias: LogitBias = Field(
        (),
        description="Token ids and what is added to their logits, -100 to 100.",
        json_schema_extra={"default": {}},
    )
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], FailFast()] = Field(
        [],
        description="Words that the answer must not have, in the tokens that spell each by itself or behind "
        "a space; other spellings are not kept away.",
    )
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(
        [],
        min_length=1,
        description="The only token ids that may be chosen. Where bad_words or min_tokens would leave none, "
        "they yield.",
    )
    min_tokens: int = Field(0, ge=0, description="Tokens before which the answer may not end by itself.")
    ignore_eos: bool = Field(False, description="Go on past the model's end-of-text tokens.")
    stop_token_ids: Annotated[list[int], FailFast()] = Field(
        [], description="Token ids that end the answer as the model's own end-of-text does."
    )
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    include_stop_str_in_output: bool = Field(False, description="Keep the stop string that ended the answer.")
    priority: int = Field(
        0,
        ge=-(2**31),
        lt=2**31,
        description="Requests of a lower number leave the waiting queue first; what runs is not interrupted.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="What the answer's text must be in other notations than OpenAI's; only one of both can "
        "be given.",
    )
    speculation: SpeculationOptions = Field(
        SpeculationOptions(), description="How this request's tokens are speculated."
    )
    stream: bool = Field(
        False,
        description="Send the answer as server-sent events while it grows, [DONE] at the end. An error after "
        "the first event comes as an event with an error object, then [DONE].",
    )
    user: str | None = Field(None, description="Taken for compatibility; has no effect, here as at OpenAI.")


class GenerationRequest(SamplingRequest):
    """The fields of completions and chat completions."""

    names: ClassVar[FieldNames] = FieldNames()

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers per prompt; they share the prompt's cache.")
    return_token_ids: bool = Field(
        False, description="Give the token ids of the prompt and of the answers, too."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report the log probability and the rank of each token of the prompt, and of this "
        "many likeliest ones; the answer has them with the first of a prompt's n choices.",
    )
    response_format: ResponseFormat | None = Field(
        None, description="What the answer's text must be; OpenAI's field. Default: anything."
    )
    stream_options: StreamOptions = Field(
        StreamOptions(), description="Options of a streamed answer; ignored without stream."
    )

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        is_free = self.response_format is None or self.response_format.type == "text"
        if self.structured_outputs is not None and not is_free:
            raise PydanticCustomError(
                "two_formats",
                "{field} cannot be had with response_format: give the format in one of both",
                {"field": "structured_outputs"},
            )
        return self

    @model_validator(mode="after")
    def _usage_at_the_end_too(self) -> Self:
        # Not checked by the options themselves, because without a stream they have no effect.
        options = self.stream_options
        if self.stream and options.continuous_usage_stats and not options.include_usage:
            raise PydanticCustomError(
                "continuous_usage_stats",
                "{field} needs include_usage; set it or leave {field} out",
                {"field": "stream_options.continuous_usage_stats"},
            )
        return self

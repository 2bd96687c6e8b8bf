"""POST /tokenize and /detokenize, and GET /version."""

from typing import Annotated, Self

from pydantic import BaseModel, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.chat import ChatMessage
from server.protocol.model import RequestModel


class TokenizeRequest(RequestModel):
    """The body of POST /tokenize: a text, or a conversation as the model's chat template renders it."""

    model: str | None = Field(
        None, description="A name that /v1/models lists; default: the model that is served."
    )
    prompt: str | None = Field(None, description="A text.")
    messages: Annotated[list[ChatMessage], FailFast()] = Field(
        [], min_length=1, description="A conversation, instead."
    )
    add_special_tokens: bool = Field(
        True, description="Put special tokens, such as a BOS, where the tokenizer does; for texts."
    )
    return_token_strs: bool = Field(False, description="Give the text of each token, too.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise PydanticCustomError(
                "one_of", "give {field}, or messages, but one of both", {"field": "prompt"}
            )
        return self


class Tokenized(BaseModel):
    """The tokens."""

    count: int = Field(description="How many there are.")
    max_model_len: int = Field(description="How many prompt and answer may have together.")
    tokens: list[int] = Field(description="Their ids.")
    token_strs: list[str] | None = Field(
        None, description="Their texts, if asked for; U+FFFD for what is no whole character."
    )


class DetokenizeRequest(RequestModel):
    """The body of POST /detokenize."""

    model: str | None = Field(
        None, description="A name that /v1/models lists; default: the model that is served."
    )
    tokens: Annotated[list[int], FailFast()] = Field(description="Token ids.")


class Detokenized(BaseModel):
    """The text."""

    prompt: str = Field(description="The text, special tokens included.")


class Version(BaseModel):
    """Which server this is."""

    version: str = Field(description="Outrider's version.")

"""What /v1/responses answers: the response and the items in it."""

from typing import Literal

from pydantic import BaseModel, Field

from server.protocol.chat import ChatTokenLogprob
from server.protocol.usage import SpeculationReport

ItemStatus = Literal["in_progress", "completed", "incomplete"]
JsonObject = dict[str, object]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[object] = Field(description="None.")
    logprobs: list[ChatTokenLogprob] = Field(description="An entry per token; empty unless asked for.")


class OutputMessage(BaseModel):
    """What the model says."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(BaseModel):
    """A call that the model asks for."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus = Field(description="incomplete: a limit cut it, and the arguments are no whole JSON.")
    call_id: str = Field(description="For the function_call_output to refer to; the same for the same seed.")
    name: str
    arguments: str = Field(description="A JSON object as text, the way the model wrote it.")


class ReasoningText(BaseModel):
    """The text of thoughts."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(BaseModel):
    """The thoughts of a model that thinks aloud."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[object] = Field(description="None: the thoughts are in the content.")
    content: list[ReasoningText]


OutputItem = ReasoningItem | OutputMessage | FunctionCallItem


class InputTokensDetails(BaseModel):
    """Where the input's tokens came from."""

    cached_tokens: int = Field(description="Tokens that the prefix cache supplied.")


class OutputTokensDetails(BaseModel):
    """What the output's tokens are."""

    reasoning_tokens: int = Field(description="Tokens of thoughts, the tag that ends them included.")


class ResponseUsage(BaseModel):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = Field(
        description="max_output_tokens, or the end of the model's context."
    )


class ResponseObject(BaseModel):
    """A response; what was asked for comes back with it."""

    id: str = Field(description="Names it, for previous_response_id and GET.")
    object: Literal["response"]
    created_at: int = Field(description="Unix time of the request.")
    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str = Field(description="The model's name, as the request spelt it.")
    output: list[OutputItem] = Field(description="What the model made, in its order.")
    usage: ResponseUsage | None = Field(description="null until the end.")
    speculation: SpeculationReport | None = Field(
        None, description="What speculation did; the key is absent until the end."
    )
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: JsonObject
    store: bool = Field(description="Whether it is kept.")
    temperature: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class DeletedResponse(BaseModel):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]

"""OpenAI's error object."""

from pydantic import BaseModel, Field


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str = Field(description="What is wrong, with the value and the limit, and what to do.")
    type: str = Field(description="invalid_request_error (the request's fault) or server_error (ours).")
    param: str | None = Field(description='The request field at fault, such as "messages[0].role".')
    code: str | None = Field(description="A word that programs can compare.")


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success, and of the frame that ends a failed stream."""

    error: ErrorBody

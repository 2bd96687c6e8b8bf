"""The models endpoint's answers."""

from typing import Literal

from pydantic import BaseModel, Field


class ModelCard(BaseModel):
    """One model."""

    id: str = Field(description="The name to put into a request's model field.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time at which the server started.")
    owned_by: str = "outrider"
    max_model_len: int = Field(description="Tokens that prompt and answer share.")


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]

"""The endpoints that describe the model."""

from typing import Annotated

from fastapi import APIRouter, Path

from server.protocol.error import ErrorResponse
from server.protocol.models import ModelCard, ModelList
from server.services.models import ModelService

FOUND = "What is served."


def models_router(models: ModelService) -> APIRouter:
    """GET /v1/models and /v1/models/{model}."""
    router = APIRouter(tags=["models"])
    name = Path(description="A name that /v1/models lists; it may have slashes.", examples=[models.name])

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", response_description=FOUND)
    async def list_models() -> ModelList:
        """The model that is served."""
        return models.list()

    # Names of hub models have a slash.
    @router.head("/v1/models/{model:path}", include_in_schema=False)
    @router.get(
        "/v1/models/{model:path}",
        response_description=FOUND,
        responses={404: {"model": ErrorResponse, "description": "There is no such model."}},
    )
    async def get_model(model: Annotated[str, name]) -> ModelCard:
        """One model by its name."""
        return models.get(model)

    return router

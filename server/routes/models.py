"""The endpoints that describe the model."""

from fastapi import APIRouter

from server.protocol.error import ErrorResponse
from server.protocol.models import ModelCard, ModelList
from server.services.models import ModelService


def models_router(models: ModelService) -> APIRouter:
    """GET /v1/models and /v1/models/{model}."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """The model that is served."""
        return models.list()

    # Names of hub models have a slash.
    @router.get(
        "/v1/models/{model:path}",
        responses={404: {"model": ErrorResponse, "description": "There is no such model."}},
    )
    async def get_model(model: str) -> ModelCard:
        """One model by its name."""
        return models.get(model)

    return router

"""Model sources over a temporary cache and a hub that may not be there."""

from pathlib import Path

from engine.catalog import CatalogModel
from engine.model.hub import Hub
from engine.model.sources import ModelSources
from engine.model.weight_cache import WeightCache

NOWHERE = "http://127.0.0.1:9"


def sources(
    cache: Path, *, endpoint: str = NOWHERE, offline: bool = False, model: CatalogModel | None = None
) -> ModelSources:
    hub = Hub(cache / "hub", offline=offline, endpoint=endpoint)
    catalog = {} if model is None else {model.name: model}
    return ModelSources(WeightCache(cache / "converted"), hub, offline=offline, catalog=catalog)

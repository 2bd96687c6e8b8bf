"""Where a model's files come from: every source ends in a Hugging Face folder on this disk."""

from pathlib import Path

from engine.config import ModelConfig
from engine.errors import ModelNotFound


class ModelSources:
    """Finds a model's files.

    Args:
        cache_dir: Where converted weights are kept.
        offline: Never touch the network.
    """

    def __init__(self, cache_dir: Path, *, offline: bool = False) -> None:
        self._cache_dir = cache_dir
        self._offline = offline

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelSources":
        """The sources as the settings want them."""
        return cls(config.cache_dir or Path.home() / ".cache" / "outrider", offline=config.offline)

    def find(self, model: str, revision: str | None = None) -> Path:
        """A folder with the model's config, weights and tokenizer.

        Raises:
            ModelNotFound: No source has the model.
        """
        path = Path(model).expanduser()
        if (path / "config.json").is_file():
            return path
        raise ModelNotFound(f"no model {model!r}")

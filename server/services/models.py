"""Which model names are answered to, and how an answer is headed."""

import hashlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from engine.client import EngineClient
from server import __version__
from server.errors import ApiError
from server.protocol.models import ModelCard, ModelList


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of one answer have in common.

    Attributes:
        id: The answer's id; the engine's request ids begin with it.
        created: Unix time of the request.
        model: The model's name as the client spells it.
        system_fingerprint: The server's version and model.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str


class ModelService:
    """The one model there is, under its served name and its own.

    Args:
        engine: The engine that runs it.
        served_name: The name shown to clients; None shows the engine's.
        clock: Unix time.
    """

    def __init__(
        self, engine: EngineClient, served_name: str | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._engine = engine
        self._served_name = served_name
        self._clock = clock
        self._started = int(clock())

    def list(self) -> ModelList:
        """All models."""
        return ModelList(data=[self._card(self.name)])

    def get(self, name: str) -> ModelCard:
        """One model.

        Raises:
            ApiError: 404; there is none of that name.
        """
        return self._card(self.resolve(name))

    @property
    def name(self) -> str:
        """The name shown to clients."""
        return self._served_name or self._engine.model.name

    def resolve(self, name: str | None) -> str:
        """The name to answer under.

        Raises:
            ApiError: 404; there is no model of that name.
        """
        if name is None:
            return self.name
        if name not in (self.name, self._engine.model.name):
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )
        return name

    def head(self, prefix: str, name: str | None) -> AnswerHead:
        """Begins an answer.

        Raises:
            ApiError: 404; there is no model of that name.
        """
        own_name = self._engine.model.name
        digest = hashlib.sha256(own_name.encode()).hexdigest()[:8]
        return AnswerHead(
            id=f"{prefix}{uuid.uuid4().hex}",
            created=int(self._clock()),
            model=self.resolve(name),
            system_fingerprint=f"outrider-{__version__}-{digest}",
        )

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._started, max_model_len=self._engine.model.max_model_len)

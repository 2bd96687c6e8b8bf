"""Whether the server takes requests."""

from engine.client import EngineClient, EngineHealth
from server.errors import unavailable


class Admission:
    """The door: open while the engine lives and the server is not draining.

    Attributes:
        draining: Set while the server shuts down: it finishes what it has and takes nothing new.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.draining = False

    @property
    def health(self) -> EngineHealth:
        """Whether the engine lives."""
        return self._engine.health()

    @property
    def obstacle(self) -> str | None:
        """Why no request can be taken, or None."""
        if self.draining:
            return "the server is shutting down"
        health = self.health
        return None if health.alive else health.reason or "the engine has ended"

    def check(self) -> None:
        """Refuses a request that comes while the server drains.

        Raises:
            ApiError: 503.
        """
        if self.draining:
            raise unavailable("the server is shutting down; try another one", "shutting_down")

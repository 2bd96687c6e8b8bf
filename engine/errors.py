"""The engine's exceptions.

EngineError
├── InvalidRequest        the request cannot be served as it stands; names the offending field
│   └── ContextTooLong    prompt and answer do not fit the context
├── Overloaded            the queue is full; try again later
├── RequestFailed         this request failed in the engine; others go on
├── EngineDead            the engine loop has ended or hangs; nothing is served
└── StartupError          a setting that cannot hold; the message says what to do
    ├── ModelNotFound     no source has the model
    └── ModelNotSupported the model cannot run on a paged KV cache; the message says why
"""


class EngineError(Exception):
    """Anything the engine raises on purpose."""


class InvalidRequest(EngineError):
    """A request that cannot be served as it stands.

    Args:
        message: What is wrong, with the value and the limit.
        param: The request field at fault, as the client spells it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, exceed the model's context."""


class Overloaded(EngineError):
    """The waiting queue is full."""


class RequestFailed(EngineError):
    """One request failed inside the engine; its neighbours are untouched."""


class EngineDead(EngineError):
    """The engine loop has ended, or hangs, and serves nothing."""


class StartupError(EngineError):
    """A setting that cannot hold, found before the first request."""


class ModelNotFound(StartupError):
    """No source (local folder, cache, hub, package index) has the model."""


class ModelNotSupported(StartupError):
    """The model cannot be run on a paged KV cache."""

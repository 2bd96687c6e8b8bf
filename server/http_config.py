"""The server's own settings, beside the engine's."""

from typing import Literal

from pydantic import Field, field_validator

from engine.sampling_params import MAX_LOGPROBS
from engine.section import A_YEAR, Section
from server.tools.formats import ToolParserName

LogLevel = Literal["debug", "info", "warning", "error"]


class HttpConfig(Section):
    """How the server is reached."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    served_model_name: str | None = Field(
        None, description="Name of the model in the API; default: the one it is loaded by."
    )
    root_path: str = Field("", description="Path prefix that a proxy strips, such as /llm.")
    max_body_mb: float = Field(8.0, gt=0, le=1 << 20, description="Largest request body accepted, in MiB.")
    max_choices: int = Field(1024, ge=1, description="Answers that one request may ask for: prompts times n.")
    max_logprobs: int = Field(
        MAX_LOGPROBS, ge=0, le=MAX_LOGPROBS, description="Alternatives per token that a request may ask for."
    )
    max_stored_responses: int = Field(
        1000,
        ge=0,
        description="Responses of /v1/responses that are kept in memory, those used last; 0 keeps none.",
    )
    max_stored_mb: float = Field(
        64.0,
        gt=0,
        le=1 << 20,
        description="Memory that they may take together, conversations included, in MiB.",
    )
    shutdown_grace_seconds: int = Field(
        30,
        ge=0,
        le=A_YEAR,
        description="Time that running answers get to finish after SIGTERM or Ctrl+C; a second signal ends "
        "them at once.",
    )
    tool_parser: ToolParserName | None = Field(
        None, description="How the model writes calls of functions; default: as its chat template does."
    )
    profiling: bool = Field(
        False,
        description="Let clients ask for traces of the engine's steps at /profile, which slow it down, and "
        "for the planner's figures at /debug/planner.",
    )
    log_level: LogLevel = Field("info", description="Least severe messages that are logged.")

    @field_validator("root_path")
    @classmethod
    def _a_prefix(cls, path: str) -> str:
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ValueError("start with a slash and not end with one")
        return path

"""Outrider's HTTP side: an OpenAI-compatible API in front of an engine it knows only as an EngineClient."""

__version__ = "0.1.0"

"""`outrider bench`: a client that measures any OpenAI-compatible server."""

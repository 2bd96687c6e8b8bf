"""From requests to engine calls, and from the engine's outputs to chunks and answers."""

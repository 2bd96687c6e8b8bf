"""Tools: how models are told of functions, made to call them, and understood when they do."""

"""Pure functions of tensors that turn rows of logits into verified tokens. No config, no requests."""

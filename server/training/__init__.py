"""`outrider train-head`: trains draft heads."""

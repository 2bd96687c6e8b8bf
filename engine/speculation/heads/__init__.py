"""Draft heads: modules that draft from the target's own hidden states, and the formats they come in."""

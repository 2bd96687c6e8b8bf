"""Models on torch and transformers: loading, attention over the paged KV cache, forward passes."""

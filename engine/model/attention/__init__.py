"""Attention over the paged KV cache: one contract (`interface.py`), one backend per kind of device."""

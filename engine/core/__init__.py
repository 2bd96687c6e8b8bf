"""Bookkeeping in plain Python on ints: no torch, no clock, testable without a model."""

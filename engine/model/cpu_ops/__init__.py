"""The operators in C++ that make a CPU step fast: built on first use, with plain torch to fall back on."""

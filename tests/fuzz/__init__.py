"""Differential tests that sample: a patched run against upstream's own, `python -m fuzz` for as long as one likes."""

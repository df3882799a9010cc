"""Optimizers: what they can do with given parameters, and which flags they get. Knows nothing of patching."""

"""Differential tests that sample: the patched against the unpatched.

`python -m fuzz --seconds N` from `tests/` runs them for as long as one likes. A module of this package has
`sample(rng)`, which draws a frozen `Case` whose `repr` is an expression that makes it again, and `check(case)`, which
raises AssertionError where the two differ.
"""

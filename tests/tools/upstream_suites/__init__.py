"""Upstreams' own tests, without and with the patches."""

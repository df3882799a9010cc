"""What a process says of itself in `FUSEPATCH_REPORT`, and what the reports of a run say together."""

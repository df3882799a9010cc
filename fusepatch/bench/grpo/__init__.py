"""`bench grpo`: a linear head with a GRPO loss."""

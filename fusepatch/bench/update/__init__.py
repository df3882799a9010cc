"""`bench update`: one update of TRL's GRPOTrainer, without generation."""

"""`bench optimizer`: the forms of AdamW, and inside backward."""

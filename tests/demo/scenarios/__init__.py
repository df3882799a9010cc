"""One module per scenario: `SCENARIO` says what is compared, `run()` is the user's code. A new module here is a new
table."""

"""Stage 3. Runs in a reader; takes records, gives scores per request and token. Never guesses."""

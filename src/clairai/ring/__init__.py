"""Stage 2. Takes rows and scores from the tap's process; gives records, and an exact count of what was lost, to any process."""

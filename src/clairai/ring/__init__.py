"""Takes one record per step from the engine; gives it to every reader, or counts it as lost."""

"""Mixed precision and memory: fewer bits, fewer bytes."""

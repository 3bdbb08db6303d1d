"""Finds, loads and checks a solution's files; carries values to and from its process."""

"""Errors that end a command: one line with what was expected, what came instead, and what to do."""


class Wrong(ValueError):
    """Bad input."""


class GradebookError(Wrong):
    """The gradebook cannot be used."""


class Busy(GradebookError):
    """Another process writes into the gradebook."""

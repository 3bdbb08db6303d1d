"""Errors that end a command: one line with what was expected, what came instead, and what to do."""


class InputError(ValueError):
    """Bad input."""


class GradebookError(InputError):
    """The gradebook cannot be used."""


class Busy(GradebookError):
    """Another process writes to the gradebook."""

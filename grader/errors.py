"""Errors that end a command. The message is one line: the expected input, the actual input, and advice."""


class InputError(ValueError):
    """Bad input."""


class GradebookError(InputError):
    """The gradebook cannot be used."""


class Busy(GradebookError):
    """Another process writes to the gradebook."""

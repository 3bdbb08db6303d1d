"""The errors that end a command: each is one line that says what was expected, what came, and what to do."""


class Wrong(ValueError):
    """Bad input."""


class GradebookError(Wrong):
    """The gradebook cannot be used."""


class Busy(GradebookError):
    """Another process writes into the gradebook."""

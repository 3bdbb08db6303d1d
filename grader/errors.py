"""The error of a gradebook that cannot be used."""


class GradebookError(RuntimeError):
    """The gradebook cannot be used; the message is one line that says why and what to do."""

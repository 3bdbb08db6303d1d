"""Data parallelism with one message per step: all gradients in one buffer."""

from .naive import NaiveDDP


class FlatDDP(NaiveDDP):
    """A replica of `module` on each rank of `group`, kept equal by one all-reduce per step and dtype.

    Construct and use it like `NaiveDDP`.
    """

    def finish_gradient_synchronization(self) -> None:
        """Replace each gradient by its mean over the group, with one all-reduce for each dtype of the gradients.

        Gradients are copied into a buffer that holds nothing else, and become views of it. If they are views of it
        already, because zero_grad(set_to_none=False) kept them, nothing is copied. Parameters without gradient (on all
        ranks) send nothing and keep None. A tied parameter counts as one parameter.
        """
        raise NotImplementedError(
            "ddp.flat: Replace each gradient by its mean over the group, with one all-reduce for each dtype of the …"
        )

"""Advice for common error messages of torch."""

REMEDIES = {
    "is not part of group": "src= and dst= are ranks of the world; group_src= and group_dst= are those of the group",
    "tensor splits not equal to group size": "splits have one number a rank of the group, which without group= is the "
    "world",
    "does not require grad and does not have a grad_fn": "nothing was recorded: no input of what was computed requires "
    "a gradient, and autograd calls the backward of a Function only where one of its tensors does",
    "leaf Variable that requires grad": "change parameters within torch.no_grad(), or change their .detach()",
    "backward through the graph a second time": "the first backward has freed the graph: detach what is kept for later",
    "modified by an inplace operation": "something that backward needs was overwritten: compute into another tensor",
    "has to be contiguous": "a message is bytes in a row: send .contiguous(), receive into what is contiguous",
    "view size is not compatible": ".reshape copies where it must, .view never does",
    "incorrect number of gradients": "backward returns one value an argument of forward, None for what is no tensor",
}


def with_remedy(text: str) -> str:
    """The text, with its remedy at the end of the first line."""
    first, newline, rest = text.partition("\n")
    remedy = remedy_for(first)
    return f"{first}: {remedy}{newline}{rest}" if remedy else text


def remedy_for(text: str) -> str:
    """Return the remedy for an error with this text; "" if we know no remedy."""
    return next((remedy for part, remedy in REMEDIES.items() if part in text), "")

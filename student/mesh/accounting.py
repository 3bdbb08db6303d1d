"""What a step on a mesh costs, on paper: FLOPs, bytes by axis, bubble, memory; and when the network is the limit."""

from dataclasses import dataclass

from lab.model.transformer import Config
from lab.provided import provided


@provided
@dataclass(frozen=True)
class Degrees:
    """How many ranks there are along each axis."""

    data: int = 1
    pipe: int = 1
    expert: int = 1
    tensor: int = 1


@provided
@dataclass(frozen=True)
class Workload:
    """A model, and what one step of it sees.

    config: `lab.model.transformer.Transformer`, its head not tied. sequences: of the whole batch, each of `context`
    tokens, in `micro_batches` of equal size. experts: 0 for dense SwiGLUs; else that many in every block, k of them for
    each token. Everything is in float32, 4 bytes.
    """

    config: Config
    sequences: int
    context: int
    micro_batches: int = 1
    experts: int = 0
    k: int = 2


@provided
@dataclass(frozen=True)
class Cost:
    """One step of the rank of one stage."""

    flops: int  # matrix products, forward and backward
    parameters: int  # held, before the data axis shards them
    bytes: dict[str, float]  # sent, by axis: "tensor", "expert", "pipe", "data", and "data×expert"
    bubble: float  # idle over busy time of the pipeline
    memory: float  # bytes of parameters, gradients and AdamW's two moments


@provided
@dataclass(frozen=True)
class Device:
    """Rates of one rank; bytes_per_s: of what it sends along any one axis, all of them at once."""

    flops_per_s: float
    bytes_per_s: float


@provided
@dataclass(frozen=True)
class Times:
    """Seconds of a feed-forward layer's forward: its products, and what is sent along data and tensor."""

    compute_s: float
    data_s: float
    tensor_s: float

    def step_s(self, overlap: bool) -> float:
        """overlap: products, data and tensor all run at once; else one after the other."""
        parts = (self.compute_s, self.data_s, self.tensor_s)
        return max(parts) if overlap else sum(parts)

    def bound(self, overlap: bool) -> bool:
        """Whether communication takes longer than compute: the longest of it where all overlap, else the sum."""
        sent = (self.data_s, self.tensor_s)
        return (max(sent) if overlap else sum(sent)) > self.compute_s


def accounting(work: Workload, degrees: Degrees, *, stage: int = 0, fsdp: bool = False) -> Cost:
    """Count one step of a rank of pipeline stage `stage`, on the mesh data × pipe × expert × tensor (D, P, E, T).

    A stage has layers / P blocks; the first also the embedding, the last the final norm and the head. The batch is
    split over D·E ranks. Bytes are those sent by the ring, (W − 1)/W · S of a reduce-scatter, all-gather or all-to-all
    of S bytes in all, twice as many of an all-reduce; of experts, those of a routing that is even.

    flops: 6 for each weight of a linear layer that a token goes through, and attention's causal products, 6 · context ·
    width a token and block; divided by T, but those of experts and router, which every tensor rank does alike. Only a
    token's k experts count.
    parameters: attention, SwiGLU, embedding and head are divided by T; norms, router and the n/E experts are not.
    bytes, all micro-batches together, with A the bytes of this rank's tokens · width:

    - tensor: all-reduces of A, forward one and backward one for attention, as many for a dense SwiGLU; one forward for
      the embedding, one backward for the head, and for its loss two all-reduces of 4-byte numbers: 1 and 2 a token;
    - expert: four all-to-alls of k·A a block, and for each micro-batch and block one of 8 · experts bytes of counts;
    - pipe: A to the next stage, A to the one before;
    - "data×expert": one all-reduce of the gradients of all that is no expert, and for each micro-batch and block with
      experts one of the 2 · experts + 1 numbers of the balancing loss; "data": one of the gradients of experts. With
      fsdp, along data, for each micro-batch: all parameters are all-gathered forward and again backward, and gradients
      reduce-scattered; along "expert" then, once a step, one more all-reduce of the shard, 1/D, of the gradients of all
      that is no expert, which "data×expert" no longer carries.

    bubble: (P − 1) / micro_batches. memory: 16 bytes a parameter, with fsdp 1/D of it; activations not counted.
    "tiny" of lab.model.transformer, 8 sequences of 256 on data=2, tensor=2: 0.43 GFLOP, 62,784 parameters, 251,136
    bytes along data×expert, and along tensor 2,633,728.
    Raises ValueError where degrees do not divide: layers by P; heads, kv_heads, hidden and vocabulary by T; experts by
    E; sequences by D · E · micro_batches; where E > 1 without experts; and for a stage that there is not.
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 3.
    """
    raise NotImplementedError(
        "mesh.accounting: Count one step of a rank of pipeline stage `stage`, on the mesh data × pipe × expert × …"
    )


def layer_times(
    tokens: float, width: int, hidden: int, *, data: int, tensor: int, device: Device, element: int = 2,
    sharded: bool = True,
) -> Times:  # fmt: skip
    """Times of y = f(x A) B forward, x (tokens, width), A (width, hidden), B (hidden, width), on data × tensor ranks.

    Products: 4 · tokens · width · hidden FLOPs, shared by all. Tensor: x is gathered before A and y reduce-scattered
    behind B, each of a data rank's tokens. Data, where parameters are sharded (FSDP): A and B, a tensor rank's part,
    are gathered; where they are not, forward sends nothing along data. By the ring, `element` bytes a number. Backward
    has twice the products, and sends twice as much along tensor and data (FSDP gathers and reduce-scatters): the same
    ratios. Without sharding backward sends one all-reduce for twice the products: sharded=True is its ratio as well.
    """
    raise NotImplementedError(
        "mesh.accounting: Times of y = f(x A) B forward, x (tokens, width), A (width, hidden), B (hidden, width), on …"
    )


def fewest_tokens(
    width: int, hidden: int, *, data: int, tensor: int, device: Device, overlap: bool, element: int = 2
) -> float:
    """The tokens of the whole batch below which a layer with FSDP × tensor is communication-bound; need not be whole.

    Both compute and tensor's bytes grow with tokens, data's do not. So without tensor (T = 1) the limit is tokens / D =
    (D − 1)/D · C·β · element/2, whether or not there is overlap, with C the device's FLOP/s and β its seconds a byte;
    and for too large a T no number of tokens is enough: infinity. 0 where nothing is sent along data, and tensor's time
    does not outlast compute. With 1e15 FLOP/s and 1e11 bytes/s, 2 bytes, D = 8: 8,750 tokens a data rank.
    Source: Austin et al. 2025, "How to Scale Your Model", chapter 5.
    """
    raise NotImplementedError(
        "mesh.accounting: The tokens of the whole batch below which a layer with FSDP × tensor is communication-bound"
    )


def best_split(
    ranks: int, tokens: float, width: int, hidden: int, *, device: Device, overlap: bool, element: int = 2
) -> tuple[int, int]:
    """(data, tensor) of `ranks` ranks with which the layer's step_s is least; of equals (1e-9) the least tensor."""
    raise NotImplementedError("mesh.accounting: (data, tensor) of `ranks` ranks with which the layer's step_s is least")

"""A planner's input, a job (what to train, and on which cluster), and its output, a plan."""

from dataclasses import dataclass

from ..model import transformer
from ..model.transformer import Config
from .hardware import Cluster

# Activations that backward recomputes: none; large ones that are quick to compute (`Layers.light`); all of a layer.
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Model(Config):
    """Sizes of a transformer. gated: SwiGLU, RMSNorm, no biases; otherwise GELU, LayerNorm and biases, as in GPT."""

    gated: bool = True
    positions: int = 0  # number of learned position embeddings
    tied: bool = False  # whether the head shares the embedding's weight

    @property
    def layer_products(self) -> int:
        """Parameters of one layer's matrix products."""
        h = self.width
        return 2 * h * (h + self.kv_heads * self.dim) + (3 if self.gated else 2) * h * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, not sharded."""
        return sum(self.layer_weights())

    def layer_weights(self) -> tuple[int, int]:
        """Return (parameters that the tensor axis shards, parameters that it replicates) of one layer."""
        h, products = self.width, self.layer_products
        if self.gated:
            return products, 2 * h
        # the biases of two products and both norms are replicated
        return products + h + 2 * self.kv_heads * self.dim + self.hidden, 2 * h + 4 * h

    @property
    def ends(self) -> tuple[int, int, int]:
        """Parameters outside the layers: (embedding; head, 0 if it is tied; final norm and positions)."""
        table = self.vocabulary * self.width
        return table, 0 if self.tied else table, self.width * ((1 if self.gated else 2) + self.positions)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + sum(self.ends)


def gpt(layers: int, width: int, heads: int, vocabulary: int = 51200, positions: int = 2048) -> Model:
    """GPT as in Megatron: hidden size 4 · width, learned positions, the head tied to the embedding."""
    return Model(layers, width, heads, heads, 4 * width, vocabulary, gated=False, positions=positions, tied=True)


def of_config(config: Config) -> Model:
    """Return the Model of a `lab.model.transformer.Transformer` with this config. Its head is not tied."""
    return Model(**vars(config))


MODELS = {name: of_config(config) for name, config in transformer.MODELS.items()}


@dataclass(frozen=True)
class Recipe:
    """How a step is implemented: which kernels are fused, what ranks send, and what may overlap. Numbers are bytes."""

    element: int = 2  # per activation or parameter
    gradient: int = 4  # per gradient, accumulated and reduced over the data axis
    optimizer: int = 12  # per parameter: a float32 copy and the two moments of AdamW
    step_traffic: int = 48  # per parameter: gradient norm, clipping and AdamW read and write them
    fused_attention: bool = True
    dropout: bool = False
    sequence: bool = True  # Korthikanti et al. 2022: the tensor axis also shards norms and residuals
    scatter_messages: bool = False  # Narayanan et al. 2021, 4.1: each tensor rank sends 1/T of a message
    overlap_tensor: bool = True  # backward gathers x while dx is computed, and scatters dx while dW is
    overlap_messages: bool = True
    overlap_data: bool = True
    fused_accumulation: bool = True  # the product itself accumulates a weight's gradient
    equal_parts: bool = False  # all parts of a pipeline must have the same number of layers


TODAY = Recipe()
# Megatron-LM of 2021: fp16, scores and dropout masks in memory, no overlap of messages and all-reduces. Its optimizer
# also keeps float32 gradients. Bytes of its passes: copy 6, unscale 8, norm 4, clip 8, AdamW 28, cast 6.
MEGATRON_2021 = Recipe(
    gradient=2, optimizer=16, step_traffic=60, fused_attention=False, dropout=True, sequence=False,
    scatter_messages=True, overlap_tensor=False, overlap_messages=False, overlap_data=False, fused_accumulation=False,
    equal_parts=True,
)  # fmt: skip
# Korthikanti et al. 2022, "present work", section 4.2.2: sequence parallelism, its gathers overlap with products.
MEGATRON_2022 = Recipe(
    gradient=4, step_traffic=60, fused_attention=False, dropout=True, overlap_messages=False, overlap_data=False,
    equal_parts=True,
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A model, a global batch of `sequences` with `context` tokens each, a cluster, and a recipe."""

    model: Model
    sequences: int
    context: int
    cluster: Cluster
    recipe: Recipe = TODAY

    def __post_init__(self) -> None:
        if min(self.sequences, self.context) < 1:
            raise ValueError(f"expected sequences and context of at least 1, got {self.sequences} and {self.context}")


@dataclass(frozen=True, order=True)
class Plan:
    """How to run a job. Ranks form a mesh data × pipe × tensor, tensor innermost. chunks: per rank; 1 means 1F1B."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    micro_batch: int = 1  # sequences
    chunks: int = 1
    recompute: str = "none"  # of RECOMPUTE
    zero: int = 0  # 0 to 3

    def micro_batches(self, job: Job) -> int:
        return job.sequences // (self.data * self.micro_batch)

    def __str__(self) -> str:
        schedule = "1F1B" if self.chunks == 1 else f"interleaved {self.chunks}"
        return (
            f"data={self.data}, pipe={self.pipe}, tensor={self.tensor}, micro-batch {self.micro_batch}, "
            f"{'no pipeline' if self.pipe == 1 else schedule}, recompute {self.recompute}, ZeRO {self.zero}"
        )


def unfit(job: Job, plan: Plan) -> str:
    """Return why a plan is not valid for a job, or "" if it is valid. Does not check memory.

    - data · pipe · tensor is the number of devices.
    - tensor divides heads, hidden and vocabulary; it divides kv_heads or is a multiple of kv_heads; and it divides
      context if the recipe uses sequence parallelism.
    - data · micro_batch divides sequences.
    - Chunks need a pipeline, at least one layer each, and a number of micro-batches that is a multiple of `pipe`.
    - All pipe · chunks parts have the same number of layers. Unless the recipe requires equal_parts, the first and the
      last part may have one layer fewer, because they also hold embedding and head.
    - recompute is one of RECOMPUTE. ZeRO needs a data axis.
    """
    m, parts = job.model, plan.pipe * plan.chunks
    for name in ("data", "pipe", "tensor", "micro_batch", "chunks"):
        if getattr(plan, name) < 1:
            return f"{name} is {getattr(plan, name)}, and at least 1"
    if plan.data * plan.pipe * plan.tensor != job.cluster.gpus:
        return f"{plan.data} x {plan.pipe} x {plan.tensor} is not {job.cluster.gpus} devices"
    for name, count in (("heads", m.heads), ("hidden", m.hidden), ("vocabulary", m.vocabulary)):
        if count % plan.tensor:
            return f"tensor={plan.tensor} does not divide {name}={count}"
    if m.kv_heads % plan.tensor and plan.tensor % m.kv_heads:
        return f"tensor={plan.tensor} neither divides kv_heads={m.kv_heads} nor is a multiple"
    if job.recipe.sequence and job.context % plan.tensor:
        return f"tensor={plan.tensor} does not divide context={job.context}"
    if job.sequences % (plan.data * plan.micro_batch):
        return f"data · micro-batch = {plan.data * plan.micro_batch} does not divide {job.sequences} sequences"
    if m.layers < parts or -m.layers % parts > (0 if job.recipe.equal_parts else min(2, parts - 1)):
        return f"{m.layers} layers cannot be spread over {parts} parts"
    if plan.chunks > 1 and (plan.pipe == 1 or plan.micro_batches(job) % plan.pipe):
        return f"{plan.chunks} chunks need a pipeline and micro-batches in groups of pipe={plan.pipe}"
    if plan.recompute not in RECOMPUTE:
        return f"recompute is {plan.recompute}, expected one of {', '.join(RECOMPUTE)}"
    if plan.zero not in range(4) or (plan.zero and plan.data == 1):
        return f"ZeRO {plan.zero} with data={plan.data}"
    return ""


def spread(layers: int, parts: int) -> list[int]:
    """Return the number of layers per part. If they do not divide, the last part has one fewer, then the first."""
    each = -(-layers // parts)
    counts = [each] * parts
    for short in range(each * parts - layers):
        counts[-1 if short == 0 else 0] -= 1
    return counts

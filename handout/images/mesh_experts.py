"""Pictures of the second half of the chapter on meshes: experts, context, the checkpoint and pitfalls."""

import torch

from reference.mesh.capacity import capacity
from reference.mesh.context import zigzag
from reference.mesh.schedule_interleaved import schedule_interleaved

from .picture import BLUE, COLOURS, GREEN, GREY, YELLOW, Picture, picture, spaced

CHOICES = [[0, 1], [0, 1], [0, 2], [0, 1], [0, 1], [1, 0]]  # first and second expert of six tokens


@picture(262, "Six tokens, two choices each, three experts of capacity four")
def routing(p: Picture) -> None:
    """Top-2 routing of six tokens to three experts with capacity: each expert's queue, and the dropped tokens."""
    capped = capacity(torch.tensor(CHOICES), 3, factor=1.0)
    p.words(16, 24, "first choices queue before second ones", "soft")
    for y, e in spaced(range(3), 48, 58):
        p.words(16, y + 26, f"expert {e}", "ink")
        queue = [(c, t) for c in range(2) for t, chosen in enumerate(CHOICES) if chosen[c] == e]
        for slot in range(max(capped.limit, len(queue))):
            x = 90 + 48 * slot + (14 if slot >= capped.limit else 0)
            if slot >= len(queue):
                p.frame(x, y, 44, 40)
                continue
            choice, token = queue[slot]
            kept = int(capped.experts[token, choice]) == e
            p.box(x, y, 44, 40, COLOURS[choice] if kept else GREY, f"t{token}", hatched=not kept)
    p.line(287, 36, 287, 208, dashed=True)
    p.words(287, 226, f"limit {capped.limit}", "soft small", "middle")
    p.words(16, 250, "blue: first choice; orange: second choice; hatched: dropped", "soft small")


@picture(268, "Rows leave by expert, arrive by rank, and are grouped by expert again")
def exchanged(p: Picture) -> None:
    """The order of rows: by expert when they leave, by source rank when they arrive, then by expert again."""
    leaving = (["A0", "A1", "B0", "C0", "D0", "D1"], ["A2", "B1", "B2", "C1", "C2", "D2"])
    for left, r in spaced(range(2), 86, 180):
        arrived = [row for source in leaving for row in source if row[0] in "ABCD"[2 * r : 2 * r + 2]]
        for y, name, rows in ((50, "leave", leaving[r]), (112, "arrive", arrived), (174, "grouped", sorted(arrived))):
            if r == 0:
                p.words(16, y + 20, name, "ink")
            for x, words in spaced(rows, left, 28):
                p.box(x, y, 26, 30, COLOURS["ABCD".index(words[0])], words)
        p.words(left, 32, f"rank {r}", "ink bold")
    p.words(16, 110, "all-to-all", "soft small")
    p.words(16, 172, "sort", "soft small")
    p.words(16, 236, "letter: expert; A and B are on rank 0, C and D on rank 1", "soft")
    p.words(16, 257, "A0, A1, A2: the rows for expert A, rank 0's before rank 1's", "soft small")


@picture(236, "Ring attention on four ranks: whose keys each rank holds in each step")
def ring_keys(p: Picture) -> None:
    """The keys that each of four ranks attends to in each step."""
    for x, step in spaced(range(4), 138, 82):
        p.words(x, 26, f"step {step}", "ink bold", "middle")
    for y, r in spaced(range(4), 38, 40):
        p.words(16, y + 22, f"rank {r}", "soft")
        for x, step in spaced(range(4), 100, 82):
            source = (r - step) % 4
            p.box(x, y, 76, 32, COLOURS[source], f"of {source}" if step else "own")
        p.words(68, y + 22, f"q{r}", "ink")
    p.words(16, 226, "queries stay; colours: the rank that keys and values began on", "soft small")


@picture(324, "A causal matrix of eight chunks on four ranks: in order, and by zigzag")
def balance(p: Picture) -> None:
    """The rank that computes each chunk of the causal matrix, with chunks assigned in order and by zigzag."""
    world, chunks, cell = 4, 8, 23.0
    in_order = [c // 2 for c in range(chunks)]
    by_zigzag = [r for c in range(chunks) for r in range(world) if c in zigzag(chunks, world, r).tolist()]
    for left, title, owner in ((16, "in order", in_order), (232, "zigzag", by_zigzag)):
        p.words(left, 24, title, "ink bold")
        for q, (y, r) in enumerate(spaced(owner, 36, cell)):
            for x, k in spaced(range(q + 1), left, cell):
                p.box(x, y, cell - 2, cell - 2, COLOURS[r], str(r), hatched=k == q)
        for y, r in spaced(range(world), 244, 18):
            work = sum(q + 0.5 for q in range(chunks) if owner[q] == r)
            p.words(left, y, f"rank {r}: {work:g} chunk pairs", "ink small")
    p.words(16, 316, "rows: chunks of queries; columns: of keys; hatched: half", "soft small")


@picture(276, "A weight saved on data=2, tensor=2, sharded, and loaded on tensor=4")
def pieces(p: Picture) -> None:
    """The rows of a weight that each of four ranks saves, and those that each of four other ranks loads."""
    p.words(16, 24, "saved: data=2, tensor=2", "ink bold")
    p.words(246, 24, "loaded: tensor=4", "ink bold")
    for y, row in spaced(range(8), 36, 26):
        t, d = row // 4, row % 4 // 2
        p.box(16, y, 180, 23, COLOURS[2 * t + d], f"tensor {t}, data {d}: row {row}")
        p.line(200, y + 12, 242, y + 12, arrow=True)
        p.box(246, y, 178, 23, COLOURS[row // 2], f"tensor {row // 2}: row {row}")
    p.words(16, 264, "one colour a rank; row 2 lies in tensor 0's part at 12 … 17", "soft small")


@picture(224, "Two sequences of four tokens on two ranks: gathered along dim 0, and along dim 1")
def shuffled(p: Picture) -> None:
    """Parts split along dim 1, joined by all_gather_into_tensor, which concatenates along dim 0, and by cat."""
    tokens = torch.arange(8).view(2, 4)
    parts = tokens.chunk(2, dim=1)
    wrong = torch.cat(parts, dim=0).view(2, 4)
    blocks = (
        ("rank 0 has", 16, 34, parts[0]), ("rank 1 has", 236, 34, parts[1]),
        ("gathered, view(2, 4)", 16, 134, wrong), ("cat(parts, dim=1)", 236, 134, torch.cat(parts, dim=1)),
    )  # fmt: skip
    for name, left, top, block in blocks:
        p.words(left, top - 10, name, "ink bold")
        for y, row in spaced(block.tolist(), top, 30):
            for x, token in spaced(row, left, 44):
                p.box(x, y, 42, 27, COLOURS[token // 4], f"{'ab'[token // 4]}{token % 4}")
    p.words(16, 214, "letter, colour: sequence; number: place of the token", "soft small")


Bar = tuple[str, int, float, float]  # kind and chunk of an action, start and length


def stuck(ranks: int = 4, micro_batches: int = 8, chunks: int = 2) -> tuple[list[list[Bar]], list[str]]:
    """Simulate interleaved 1F1B where a rank also waits for its sends, and messages are not buffered.

    Returns each rank's actions until all ranks are blocked, and the send that each rank waits for.
    """
    orders = [schedule_interleaved(r, ranks, micro_batches, chunks) for r in range(ranks)]
    done, now, waits = [list[Bar]() for _ in orders], [0.0] * ranks, [""] * ranks
    started: dict[tuple[bool, str, int, int], float] = {}  # (send, kind, micro-batch, target stage): time
    while True:
        before = len(started), sum(map(len, done))
        for r, order in enumerate(orders):
            n, others = len(done[r]), list[float | None]()
            for i in range(max(n - 1, 0), n + 1):  # send the last action's result, receive the next action's input
                action, send = order[i], i < n
                stage, step = action.chunk * ranks + r, 1 if action.kind == "forward" else -1
                peer = stage + step if send else stage - step
                if 0 <= peer < ranks * chunks:
                    key = action.kind, action.micro_batch, peer if send else stage
                    started.setdefault((send, *key), now[r])
                    others.append(started.get((not send, *key)))
                    if send:
                        waits[r] = f"{action.kind[0]}{action.micro_batch} to rank {peer % ranks}"
            if None not in others:
                start = max([now[r], *(time for time in others if time is not None)])
                now[r] = start + (1 if order[n].kind == "forward" else 2) / chunks
                done[r].append((order[n].kind, order[n].chunk, start, now[r] - start))
        if before == (len(started), sum(map(len, done))):
            return done, waits


@picture(190, "Interleaved 1F1B on NCCL: four ranks that wait in a circle")
def circle(p: Picture) -> None:
    colours = {"forward": (BLUE, GREEN), "backward": (GREY, YELLOW)}
    for r, (y, (bars, waits)) in enumerate(spaced(zip(*stuck(), strict=True), 12, 34)):
        p.words(16, y + 19, str(r), "soft small")
        for kind, chunk, start, length in bars:
            p.box(30 + 13.5 * start, y, 13.5 * length - 1.5, 28, colours[kind][chunk])
        end = 30 + 13.5 * (bars[-1][2] + bars[-1][3])
        p.frame(end + 2, y, 424 - end, 28, f"sends {waits}")
    p.words(16, 164, "rows: ranks; blue, green: forward of chunk 0, 1; yellow:", "soft small")
    p.words(16, 181, "backward of chunk 1; b0: the gradient of micro-batch 0", "soft small")

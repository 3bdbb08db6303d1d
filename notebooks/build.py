"""Builds and executes the notebooks: `python -m notebooks.build [6_mesh …]`, all by default. Cells are plain text here, to be read in a diff.

Outputs are committed; they come from the reference. A reader's copy runs on `student` by one switch.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from .planning import PLANNING

HERE = Path(__file__).resolve().parent

SWITCH = '''
IMPL = "reference"  # or "student"

import os, sys
from pathlib import Path
places = (Path.cwd(), *Path.cwd().parents, *Path.cwd().glob("*/"))  # the last: in Colab the kit lies beside the notebook
ROOT = next((p for p in places if (p / "assignment.toml").exists()), None)
if ROOT is None:
    raise SystemExit(f"expected the kit in {Path.cwd()} or above, found none: clone it there, or unzip the archive there")
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt
from lab.runner import ProbeFailed, Room, Runner
runner = Runner(Room(ROOT / IMPL))
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe-Ito

def ask(probe, *args, **options):
    """The probe's value, or one clear line and None where the exercise is not written yet."""
    try:
        return runner.run(probe, *args, **options)
    except ProbeFailed as error:
        print(error.text)
'''

BENCHMARKING = [
    ("md", """
        # 1 · Benchmarking: what a clock sees
        A simulated GPU takes a known time for each step. Its first calls are slow, as if they compiled. We ask three
        timers what a step takes: yours, one that never waits, and one that counts the warm-up."""),
    ("code", SWITCH),
    ("code", """
        from tests.benchmarking import probes

        import random
        draw = random.Random(0)
        warmup, steps = 3, 40
        device_s = [0.2, 0.08, 0.03] + [draw.gauss(0.010, 0.0006) for _ in range(steps)]
        nothing = [0.0] * len(device_s)
        yours = ask(probes.timed_steps, nothing, device_s, nothing, warmup, steps, device="simulated")
        cold = ask(probes.timed_steps, nothing, device_s, nothing, 0, warmup + steps, device="simulated")"""),
    ("code", """
        from lab.measure.device import SimulatedGPU
        import time

        with SimulatedGPU() as gpu:  # a timer that never waits, written out
            hasty = []
            for seconds in device_s[warmup:]:
                start = time.perf_counter()
                gpu.launch(seconds)
                hasty.append(time.perf_counter() - start)
        print(f"without synchronize: a step seems to take {1e6 * sum(hasty) / steps:.1f} µs")
        if yours:
            print(f"yours:               {1e3 * yours['median']:.2f} ms (median of {steps})")
            print(f"warm-up counted in:  {1e3 * cold['mean']:.2f} ms (mean), {1e3 * cold['median']:.2f} ms (median)")"""),
    ("code", """
        if yours:
            figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3))
            left.hist([1e3 * s for s in yours["samples"]], bins=12, color=BLUE, hatch="//", edgecolor="white")
            left.set(title="warmed up, synchronized", xlabel="ms", ylabel="steps")
            middle.hist([1e6 * s for s in hasty], bins=12, range=(0, 12), color=GREEN, hatch="..", edgecolor="white")
            middle.set(title="never synchronized", xlabel="µs", ylabel="steps")
            slow = [10 ** (0.7 + i / 8) for i in range(15)]  # ms
            right.hist([1e3 * s for s in cold["samples"]], bins=slow, color=ORANGE, hatch="xx", edgecolor="white")
            right.set(title="warm-up counted in", xlabel="ms", ylabel="steps", xscale="log")
            figure.tight_layout()
            plt.show()"""),
    ("md", """
        *Three histograms. Left, samples lie around 10 ms. In the middle, all lie at 5 µs: the time to ask, not the time it takes.
        Right, most lie at 10 ms and three far to the right of them, at 30, 80 and 200.*

        | timer | what it says of a 10 ms step |
        |---|---|
        | never waits | 5 µs: the time to ask |
        | counts the warm-up, mean | 17 ms |
        | waits, warmed up | 10 ms |"""),
    ("md", """
        ## The roofline, with a model's layers on it
        Each layer of a transformer of GPT-2's size, forward, at batch 8 and context 1,024 in bfloat16, on an A100's roof.
        Left of the ridge memory binds; right of it arithmetic does."""),
    ("code", """
        from dataclasses import asdict
        from lab.model.transformer import SIZES
        from tests.benchmarking import probes_counting

        peaks = (312e12, 2.039e12)
        bounds = ask(probes_counting.roofline, asdict(SIZES["small"]), 8, 1024, "bfloat16", peaks)
        if bounds:
            print(f"{'layer':10}  FLOPs a byte  at least, µs  bound by")
            for name, (flops, bytes, intensity, seconds, by) in bounds.items():
                if name.endswith(" forward"):
                    print(f"{name.split()[0]:10}  {intensity:12.0f}  {1e6 * seconds:12.0f}  {by}")"""),
    ("code", """
        if bounds:
            ridge, figure = peaks[0] / peaks[1], plt.figure(figsize=(7, 4))
            axes = figure.add_subplot()
            axes.plot([8, ridge, 2000], [8 * peaks[1] / 1e12, 312, 312], color="black")
            axes.annotate(f"ridge: {ridge:.0f}", (ridge, 312), textcoords="offset points", xytext=(-60, 4))
            marks = {"compute": ("o", BLUE), "memory": ("s", ORANGE)}
            below = {"scores": (8, -12), "q_proj": (-16, -18), "gate_proj": (-16, -32), "down_proj": (-16, -46), "head": (4, -18)}
            for name, (flops, bytes, intensity, seconds, by) in bounds.items():
                layer, direction = name.split()
                if direction == "forward" and layer in below:
                    mark, colour = marks[by]
                    axes.plot(intensity, flops / seconds / 1e12, mark, color=colour, markersize=8)
                    place = (intensity, flops / seconds / 1e12)
                    axes.annotate(layer, place, textcoords="offset points", xytext=below[layer])
            axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s, at most", ylim=(10, 700))
            plt.show()"""),
    ("md", """
        *A line that rises to the ridge at 153 FLOPs a byte and is flat from there. The scores of attention, a square, are far
        left of the ridge, at 28: they can reach a fifth of the peak. All linear layers, circles, are on the flat part.* The
        table above has the numbers. k_proj, v_proj and o_proj lie on q_proj here, up_proj on gate_proj, values on scores."""),
]  # fmt: skip

PRECISION = [
    ("md", """
        # 2 · Mixed precision and memory: what fits
        Gradients of the activations of a small transformer, which a float16 backward would compute with, as histograms
        over powers of two, with float16's range marked."""),
    ("code", SWITCH),
    ("code", """
        import torch
        from lab.model.transformer import SIZES, Transformer

        torch.manual_seed(0)
        model, tokens = Transformer(SIZES["tiny"]), torch.randint(256, (8, 128))
        seen = []
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_full_backward_hook(lambda layer, into, out: seen.append(out[0].flatten()))
        model.loss(tokens, tokens.roll(-1, 1)).backward()
        gradients = torch.cat(seen)
        exponents = gradients[gradients != 0].abs().log2()
        lost = (exponents < -25).float().mean().item()  # rounded to zero: less than half of the smallest
        small = ((exponents >= -25) & (exponents < -14)).float().mean().item()
        print(f"zero in float16: {lost:.1%}, with fewer digits (subnormal): {small:.1%}")
        print(f"times 2^12: zero {(exponents + 12 < -25).float().mean().item():.2%}, infinite {(exponents + 12 > 16).sum()}")"""),
    ("code", """
        figure, axes = plt.subplots(figsize=(8, 3))
        bins = range(-40, 20)
        axes.hist(exponents.clamp(min=-40).numpy(), bins=bins, color=BLUE, hatch="//", edgecolor="white", label="gradients")
        axes.hist((exponents + 12).numpy(), bins=bins, histtype="step", color=ORANGE, linewidth=2, label="times 2¹²")
        for x, name in ((-24, "smallest"), (-14, "smallest normal"), (16, "largest")):
            axes.axvline(x, color="black", linestyle="--")
            axes.annotate(name, (x, axes.get_ylim()[1] * 0.93), xytext=(3, 0), textcoords="offset points", fontsize=8)
        axes.set(xlabel="log₂ |gradient|", ylabel="how many")
        axes.legend(loc="upper left")
        plt.show()"""),
    ("md", """
        *Two histograms over powers of two: gradients, filled, lie left of float16's smallest normal number, 2⁻¹⁴, and a part of
        them left of its smallest, 2⁻²⁴; scaled by 2¹², an outline of the same shape twelve steps to the right, they lie
        around and above the smallest normal, and well below the largest, 65,504 or nearly 2¹⁶.*"""),
]  # fmt: skip

MEMORY = [
    ("md", """
        ## Memory over a step
        What is alive after every allocation, by the phase it was made in; parameters left out. Above as it comes, below with
        every block checkpointed by yours."""),
    ("code", """
        from dataclasses import asdict
        from lab.measure.memory import Memory
        from lab.plots.memory import memory_timeline
        from tests.mixed_precision import probes_memory

        sizes, pictures = asdict(SIZES["tiny"]) | {"layers": 6, "width": 128, "hidden": 344}, []
        figure, both = plt.subplots(2, 1, figsize=(8, 6), sharey=True)
        for axes, checkpointed in zip(both, (False, True)):
            got = ask(probes_memory.timeline, sizes, 8, 128, checkpointed)
            if got:
                memory = Memory(peak_bytes=got["peak"], events=[tuple(e) for e in got["events"]])
                pictures.append(memory_timeline(axes, memory, "checkpointed" if checkpointed else "plain"))
        figure.tight_layout()
        plt.show()"""),
    ("code", """
        for picture in pictures:
            print(picture.alt, picture.table, "", sep="\\n")"""),
    ("md", """
        *Two pictures of areas. In the upper one the area of forward grows to the end of forward, and falls in backward as
        gradients, the second area, grow. In the lower one forward hardly grows; backward rises and falls once for each block,
        as it is computed again.*"""),
]  # fmt: skip

FLASH = [
    ("md", """
        # 3 · FlashAttention-2: what never exists
        Memory of attention with the whole matrix, and by tiles, as N grows. Both are metered under torch's dispatcher: exact
        on any machine."""),
    ("code", SWITCH),
    ("code", """
        import torch
        from lab.measure.memory import meter
        from tests.flash_attention import probes

        lengths, naive, tiled = [256, 512, 1024, 2048], [], []
        for n in lengths:
            q = k = v = torch.randn(1, n, 64)
            with meter(inputs=(q,)) as measured:
                (q @ k.mT / 8).softmax(-1) @ v
            naive.append(measured.peak_bytes / 2**20)
            got = ask(probes.memory, q, k, v, False)
            tiled.append(got["peak_bytes"] / 2**20 if got else float("nan"))
        for row in zip(lengths, naive, tiled):
            print("N = {:5d}: whole matrix {:7.2f} MiB, by tiles {:5.2f} MiB".format(*row))"""),
    ("code", """
        figure, axes = plt.subplots(figsize=(5, 3))
        axes.plot(lengths, naive, marker="s", color=ORANGE, label="whole matrix: grows with N²")
        axes.plot(lengths, tiled, marker="o", color=BLUE, label="by tiles: grows with N")
        axes.set(xscale="log", yscale="log", xlabel="N", ylabel="peak, MiB", xticks=lengths, xticklabels=lengths)
        axes.minorticks_off()
        axes.legend()
        plt.show()"""),
    ("md", """
        *Two lines on logarithmic axes: the upper one, the whole matrix, rises four times for each doubling of N; the lower
        one, by tiles, at most twice.* The numbers are printed above it."""),
    ("md", """
        ## The running maximum and sum
        Four queries against 512 keys in eight tiles. After each tile: the maximum m, which rises in steps, and the sum l,
        which is rescaled each time it does."""),
    ("code", """
        from tests.flash_attention import probes_steps

        torch.manual_seed(1)
        tiles = [torch.randn(4, 64) * 2 for _ in range(8)]
        after = ask(probes_steps.softmax_statistics, [{"tiles": tiles[: i + 1]} for i in range(8)])
        if after:
            m = torch.stack([a["maximum"] for a in after])
            l = torch.stack([a["normaliser"] for a in after])
            figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
            for row, (mark, colour) in enumerate(zip("os^D", (BLUE, ORANGE, GREEN, "#CC79A7"))):
                left.step(range(1, 9), m[:, row], where="post", marker=mark, markersize=4, color=colour, label=f"query {row}")
                right.plot(range(1, 9), l[:, row], marker=mark, markersize=4, color=colour)
            left.set(title="m", xlabel="tiles seen"), right.set(title="l", xlabel="tiles seen")
            left.legend()
            plt.show()
            print("query 0, m:", *(f"{x:.2f}" for x in m[:, 0]))
            print("query 0, l:", *(f"{x:.2f}" for x in l[:, 0]))
            whole = torch.cat(tiles, -1)[0].logsumexp(0)
            print(f"lse = m + ln l = {after[-1]['lse'][0]:.6f}, torch.logsumexp = {whole:.6f}")"""),
    ("md", """
        *Left, four staircases that only rise. Right, four lines that rise with each tile and drop where the maximum of their
        query rose.*"""),
    ("md", """
        ## Which tiles the kernel visits
        The fused kernel in Triton's interpreter. Every load of k is recorded by address, so this is what the kernel does, not
        what it should: a dot for each tile of keys that a tile of queries loads, with a causal mask and without."""),
    ("code", """
        from tests.flash_attention import probes_kernels

        q, k, v = (torch.randn(1, 1, 1024, 16).half() for _ in range(3))
        seen = {c: ask(probes_kernels.visits, q, k, v, c, timeout=120) for c in (False, True)}
        if all(seen.values()):
            figure, panels = plt.subplots(1, 2, figsize=(8, 3.5))
            for panel, (is_causal, got) in zip(panels, seen.items()):
                first = {tuple(p): rows[0] for p, _, rows in got["stores"]}
                x = [low for p, _, low, _ in got["loads"]]
                y = [first[tuple(p)] for p, *_ in got["loads"]]
                panel.plot(x, y, "s", markersize=9, color=BLUE, markeredgecolor="white")
                panel.set(title="causal" if is_causal else "full", xlabel="first key of the tile", ylabel="first query")
                panel.set(xlim=(-64, 1024), ylim=(1024, -64))
                print(f"{'causal' if is_causal else 'full':6}: {len(x)} tiles of k are loaded")
            figure.tight_layout()
            plt.show()"""),
    ("md", """
        *Left, a full square of marks. Right, a staircase: nothing above the diagonal.*"""),
    ("md", """
        ## The roofline
        What attention costs at dim 128, 16 heads, in bfloat16, forward, on an H100: 989 TFLOP/s and 3.35 TB/s."""),
    ("code", """
        peak, bandwidth = 989e12, 3.35e12
        shared = {"batch": 1, "heads": 16, "dim": 128, "direction": "forward"}
        cases = [{**shared, "queries": n, "keys": n} for n in (1024, 2048, 4096, 8192)]
        cost = {name: ask(probes_steps.costs, [{**c, "algorithm": name} for c in cases]) for name in ("naive", "flash")}
        if all(cost.values()):
            figure, axes = plt.subplots(figsize=(6, 3.5))
            ridge = peak / bandwidth
            axes.plot([20, ridge, 1000], [20 * bandwidth / 1e12, peak / 1e12, peak / 1e12], color="black")
            for name, mark, colour in (("naive", "s", ORANGE), ("flash", "o", BLUE)):
                x = [c["intensity"] for c in cost[name]]
                axes.plot(x, [min(peak, i * bandwidth) / 1e12 for i in x], mark, color=colour, label=name, markersize=8)
                print(f"{name}: FLOPs a byte at N = 1k, 2k, 4k, 8k:", *(f"{i:.0f}" for i in x))
            axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s, at most")
            axes.legend()
            plt.show()"""),
    ("md", """
        *A line that rises to the ridge at 295 FLOPs a byte. Naive attention lies at 57 to 63 whatever N is: every score is
        written and read. Flash attention with tiles of 128 queries lies at 114 to 126, if k and v came from memory each time;
        in truth the programs of one head read them from the L2 cache, and the kernel is bound by arithmetic.*"""),
]  # fmt: skip

DDP = [
    ("md", """
        # 4 · Data parallelism: what is sent, and when
        Ranks on this machine train a small transformer. The *ledger* of the process group says what each sent; a *link* makes
        every message cost latency and bandwidth, as on a network. First what the simplest wrapper sends in one step."""),
    ("code", SWITCH),
    ("code", """
        from collections import Counter
        from lab.plots.timeline import Span, spans, timelines
        from lab.world.cluster import Link
        from tests.ddp import probes_timeline as probes

        sizes = {"layers": 3, "width": 96, "heads": 4, "kv_heads": 4, "hidden": 256, "context": 64}
        KINDS = {"naive": {}, "flat": {}, "overlapped": {}, "bucketed": {"bucket_bytes": 400_000}}
        link = Link(alpha_s=1e-3, bytes_per_s=100e6)
        steps = {kind: ask(probes.step, kind, sizes, 4, options, world=2, link=link) for kind, options in KINDS.items()}
        for kind, ranks in steps.items():
            if ranks:
                rows = [r for r in ranks[0]["rows"] if r["op"] == "all_reduce"]
                phases = ", ".join(f"{n} in {phase}" for phase, n in Counter(r["phase"] for r in rows).items())
                cost = sum(link.cost_s("all_reduce", r["bytes"], 2) for r in rows)
                print(f"{kind:<11} {len(rows):>3} all-reduces ({phases}), {sum(r['bytes'] for r in rows):>9,} bytes, "
                      f"{1e3 * cost:.0f} ms on this link")"""),
    ("md", """
        The same bytes each time. What differs is how many messages they make, each of which pays the latency twice on two ranks,
        and when they leave. One step of each wrapper, all on one axis of time:"""),
    ("code", """
        panels = {
            kind: spans([r["rows"] for r in ranks], [[Span(*s) for s in r["compute"]] for r in ranks])
            for kind, ranks in steps.items() if ranks
        }
        if panels:
            figure, pictures = timelines(panels)
            plt.show()
            for picture in pictures.values():
                print(picture.alt)"""),
    ("md", """
        *Four panels, two ranks each: forward, backward and the optimizer's step above, messages below.* In **naive** and **flat**
        the lower row begins where backward ends. In **overlapped** it begins soon after backward does, but dozens of small
        messages pay the latency one after the other and run on long after it. In **bucketed** few messages leave while
        backward goes on, and only the last sticks out.

        What is computed does not change. Four ranks, thirty steps on the bytes of this kit's handout, each wrapper:"""),
    ("code", """
        import torch

        text = torch.tensor(list((ROOT / "handout" / "ddp.md").read_bytes()))
        starts = torch.randint(len(text) - 65, (30, 8), generator=torch.Generator().manual_seed(0))
        tokens = text[starts[..., None] + torch.arange(65)]
        small = {**sizes, "layers": 2, "width": 64, "hidden": 128}
        curves = {kind: ask(probes.losses, kind, small, tokens, options, world=4) for kind, options in KINDS.items()}
        curves = {kind: ranks[0] for kind, ranks in curves.items() if ranks}
        figure, axes = plt.subplots(figsize=(6, 3))
        for (kind, losses), style, colour in zip(curves.items(), ("-", "--", "-.", ":"), (BLUE, ORANGE, GREEN, "black")):
            axes.plot(losses, style, color=colour, label=kind, linewidth=3)
        axes.set(xlabel="step", ylabel="loss, nats a byte")
        if curves:
            axes.legend()
            plt.show()
            first = next(iter(curves.values()))
            for kind, losses in curves.items():
                print(f"{kind:<11} last loss {losses[-1]:.6f}, farthest from {next(iter(curves))}: "
                      f"{max(abs(a - b) for a, b in zip(losses, first)):.1e}")"""),
    ("md", """
        *Four curves that lie on one another, from 5.6 down.* Sums in another order differ in the last bits, and no more. So
        the loss says nothing of how a wrapper sends: that is why its exercises are judged by the ledger and the clock too."""),
]  # fmt: skip

ZERO = [
    ("md", """
        # 5 · ZeRO: who keeps what
        AdamW on a tiny transformer in float32: the bytes that a rank holds after a step, at 1, 2, 4 and 8 ranks, beside what
        the formulas say. Measured: the sizes of parameters, gradients and moments, and, as a check that nothing is hidden, of
        every storage that torch's operations have met."""),
    ("code", SWITCH),
    ("code", """
        from notebooks import probes
        from tests.zero import probes_accounting, probes_state

        names = {"none": "data parallel", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
        kinds, worlds = ("parameters", "gradients", "optimizer"), (1, 2, 4, 8)
        held, formula = {}, {}
        for method in probes.STAGES:
            for world in worlds:
                ranks = ask(probes.bytes_by_kind, method, world=world)
                if ranks is None:
                    break
                fullest = max(ranks, key=lambda rank: rank["optimizer"])
                held[method, world] = {kind: fullest[kind] / 2**10 for kind in (*kinds, "else")}
                counted = ask(probes_accounting.counted, fullest["sizes"], world, method, "float32", 0, 1)
                formula[method, world] = counted and {kind: counted[kind] / 2**10 for kind in kinds}
        if held:
            print("KiB on the fullest rank: measured, (formula)")
            print(f"{'':13} ranks  {'parameters':>16} {'gradients':>16} {'optimizer':>16} {'else':>6}")
        for (method, world), mine in held.items():
            said = formula[method, world] or dict.fromkeys(kinds, float("nan"))
            each = " ".join(f"{mine[k]:7.1f} ({said[k]:6.1f})" for k in kinds)
            print(f"{names[method]:13} {world:5}  {each} {mine['else']:6.1f}")"""),
    ("code", """
        figure, panels = plt.subplots(1, 4, figsize=(11, 3.2), sharey=True)
        looks = {"parameters": (BLUE, ""), "gradients": (ORANGE, "///"), "optimizer": (GREEN, "...")}
        for panel, method in zip(panels, probes.STAGES):
            mine = [held[method, world] for world in worlds if (method, world) in held]
            below = [0.0] * len(mine)
            for kind in kinds:
                high = [m[kind] for m in mine]
                panel.bar(range(len(mine)), high, bottom=below, width=0.7, color=looks[kind][0], hatch=looks[kind][1],
                          edgecolor="white", label=kind)
                below = [b + h for b, h in zip(below, high)]
            said = [formula.get((method, world)) for world in worlds[: len(mine)]]
            panel.plot([i for i, f in enumerate(said) if f], [sum(f.values()) for f in said if f], "k_",
                       markersize=30, markeredgewidth=1.5, label="formula, all three")
            panel.set(title=names[method], xlabel="ranks", xticks=range(4), xticklabels=worlds)
        panels[0].set(ylabel="KiB a rank")
        if held:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.92))
        plt.show()"""),
    ("md", """
        *Four panels of four stacked bars, a black line at the formula's height on each. Data parallel: all bars are as high,
        half of each the optimizer's. ZeRO-1: the optimizer's part halves with each doubling of ranks, nearly, since tensors stay
        whole. ZeRO-2: the gradients' part too. ZeRO-3: all three, so that the bar of 8 ranks is an eighth of the first.* The
        numbers are printed above it. What is `else` is tokens, RoPE's tables and AdamW's counts of steps."""),
    ("md", """
        ## Going on with another number of ranks
        Eight steps on 2 ranks, a checkpoint, eight on 4, a checkpoint, eight on 3; and all 24 in one process that is never
        interrupted."""),
    ("code", """
        import torch

        torch.manual_seed(0)
        width, options, x = 8, {"lr": 0.02, "weight_decay": 0.1}, torch.randn(16, 8)
        state = dict(probes_state.Model(width).state_dict())
        batches = [[x] * 8 for _ in range(3)]
        stages = [[[0, 1], False], [[0, 1, 2, 3], False], [[1, 2, 3], True]]
        whole = ask(probes_state.oracle, width, "AdamW", options, state, batches)
        ranks = ask(probes_state.resume, width, "AdamW", options, state, batches, stages, world=4)
        if ranks:
            figure, axes = plt.subplots(figsize=(8, 3))
            axes.plot(range(24), sum(whole["losses"], []), color="black", linewidth=1, label="never interrupted")
            for i, ((members, _), mark, colour) in enumerate(zip(stages, "os^", (BLUE, ORANGE, GREEN))):
                losses = ranks[members[0]]["losses"][i]
                axes.plot(range(8 * i, 8 * i + 8), losses, mark, color=colour, label=f"{len(members)} ranks")
                off = max(abs(a - b) for a, b in zip(losses, whole["losses"][i]))
                files = ranks[members[0]]["files"][i]
                print(f"{len(members)} ranks: losses {losses[0]:.4f} … {losses[-1]:.4f}, off by {off:g}; then saved as",
                      ", ".join(f"{name} ({size:,} B)" for name, size, _ in files))
            for step in (7.5, 15.5):
                axes.axvline(step, color="0.7", linestyle="--", linewidth=0.8)
            axes.set(xlabel="step", ylabel="loss")
            axes.legend(ncols=4, fontsize=8)
            plt.show()"""),
    ("md", """
        *A line that falls and then flattens, and on it, without a jump at the two dashed lines where the number of ranks changes,
        circles, squares and triangles.* The losses are equal to the last bit: state is saved by the parameters' names, and whoever owns a tensor
        now finds it."""),
]  # fmt: skip

MESH = [
    ("md", """
        # 6 · A 4D mesh: four cuts, one model
        Sixteen ranks as data × pipe × expert × tensor, 2 of each. The same ranks, once for each axis: those of one colour
        and hatch talk with each other."""),
    ("code", SWITCH),
    ("code", """
        from IPython.display import Markdown
        from lab.plots import mesh as plots_mesh, schedule as plots_schedule, losses as plots_losses
        from notebooks import probes

        groups = ask(probes.mesh_groups, {"data": 2, "pipe": 2, "expert": 2, "tensor": 2})
        if groups:
            figure, panels = plt.subplots(1, 4, figsize=(9, 2.4), dpi=60)
            picture = plots_mesh.mesh(panels, groups, columns=4)
            figure.tight_layout()
            plt.show()
            display(Markdown(picture.table))"""),
    ("md", """
        *Tensor groups are pairs of neighbours, 0 and 1, 2 and 3. Data groups pair the upper half with the lower, 0 with 8: they meet
        once a step, and may be far apart.*

        ## Schedules
        Four stages, eight micro-batches; a backward takes as long as two forwards. White is waiting."""),
    ("code", """
        from lab.world.schedule import Action, check

        actions = ask(probes.schedules, 4, 8, 2)
        if actions:
            figure, panels = plt.subplots(3, 1, figsize=(8, 5), dpi=60)
            played = {}
            for panel, (name, ranks) in zip(panels, actions.items()):
                chunks = 2 if name == "interleaved" else 1
                ranks = [[Action(*a) for a in rank] for rank in ranks]
                # A chunk of two has half of a stage's layers: its forward takes half as long.
                played[name] = check(ranks, 8, chunks, forward=1 / chunks, backward=2 / chunks)
                plots_schedule.schedule(panel, played[name], name, end=36)
            figure.tight_layout()
            plt.show()
            for name, s in played.items():
                print(f"{name:12} idle / busy {s.bubble:.3f}   activations kept, by rank: {s.live}")"""),
    ("md", """
        *Three bands of four rows. GPipe: forwards run down like stairs, then backwards run up; each rank keeps all eight activations.
        1F1B: as much white, but from the middle on forward and backward take turns, and rank r keeps 4 − r. Interleaved: half of
        the white, for twice as many messages.* Idle over busy time is (p − 1)/m = 3/8, and with v = 2 chunks 3/16.

        ## Eight meshes, one curve
        A transformer of four layers with four experts in each, on this book's own bytes: eight meshes of up to 16 ranks,
        the same batches, AdamW."""),
    ("code", """
        steps, texts = 12, str(ROOT / "handout")
        meshes = {
            "one rank": ({}, {}),
            "data=2, sharded": ({"data": 2}, {"fsdp": True, "small": 0}),
            "tensor=2, sequence": ({"tensor": 2}, {"sequence": True}),
            "pipe=4, 1F1B": ({"pipe": 4}, {"micro_batches": 1}),
            "pipe=2, interleaved": ({"pipe": 2}, {"schedule": "interleaved", "chunks": 2, "micro_batches": 1}),
            "expert=4": ({"expert": 4}, {}),
            "data=2 × expert=2 × tensor=2": ({"data": 2, "expert": 2, "tensor": 2}, {}),
            "2 × 2 × 2 × 2": ({"data": 2, "pipe": 2, "expert": 2, "tensor": 2}, {}),
        }
        runs = {}
        for name, (degrees, plan) in meshes.items():
            plan = {"micro_batches": 1, **plan}
            if plan.get("chunks"):
                plan["micro_batches"] = 2  # it goes round in groups of as many as there are stages
            world = 1
            for degree in degrees.values():
                world *= degree
            ranks = ask(probes.mesh_run, degrees, plan, steps, texts, world=world)
            if ranks:
                runs[name] = ranks
        if runs:
            figure, axes = plt.subplots(figsize=(8, 3.2), dpi=70)
            plots_losses.losses(axes, {name: ranks[0]["losses"] for name, ranks in runs.items()})
            axes.legend(ncols=2, fontsize=8)
            plt.show()
            alone = runs["one rank"][0]["losses"]
            for name, ranks in runs.items():
                off = max(abs(a - b) / b for a, b in zip(ranks[0]["losses"], alone))
                print(f"{name:30} {len(ranks):2} ranks: {alone[0]:.4f} → {ranks[0]['losses'][-1]:.4f}, off by {off:.1e}")"""),
    ("md", """
        *Eight curves of which one is seen: they lie on each other.* What they are off by is rounding, which may send a token to
        another expert, and with two micro-batches the balancing loss, which is then a mean over two halves of the batch.

        ## Bytes by axis
        What one rank of the mesh with 16 sent in a step, from the ledger, beside what the accounting says."""),
    ("code", """
        name = "2 × 2 × 2 × 2"
        degrees, plan = meshes[name]
        said = ask(probes.mesh_cost, degrees, plan)
        if said and name in runs:
            axes_of = {}
            for axis, groups_of in groups.items():
                axes_of |= {" ".join(map(str, g)): axis for g in groups_of if 0 in g}
            both = sorted(r for g in groups["data"] for r in g if set(g) & set(next(x for x in groups["expert"] if 0 in x)))
            axes_of[" ".join(map(str, both))] = "data×expert"
            sent = {axes_of[g]: b for g, b in runs[name][0]["sent"].items() if g in axes_of}
            figure, axes = plt.subplots(figsize=(8, 3))
            for place, axis in enumerate(said):
                axes.bar(place - 0.2, sent.get(axis, 0) / 1024, 0.38, color=BLUE, label="ledger" if not place else None)
                axes.bar(place + 0.2, said[axis] / 1024, 0.38, color=ORANGE, hatch="///", edgecolor="white",
                         label="accounting" if not place else None)
                print(f"{axis:12} ledger {sent.get(axis, 0):10,.0f}   accounting {said[axis]:10,.0f}")
            axes.set(xticks=range(len(said)), xticklabels=list(said), ylabel="KiB a step, rank 0")
            axes.legend()
            plt.show()"""),
    ("md", """
        *Five pairs of bars, of equal height but for expert: the accounting has a routing that is even. Most goes over data, where
        experts' gradients are summed, least over pipe. Were the model wider by ten, data's bar would be a hundred times as high, tensor's ten.*

        ## Expert load
        Tokens that each expert was given in the last step; the balancing loss has had twelve steps to even them out."""),
    ("code", """
        if "expert=4" in runs:
            import re
            loads = {}
            for rank, said in enumerate(runs["expert=4"]):
                for module, counts in said["loads"]:
                    layer = int(re.search(r"blocks\\.(\\d+)", module)[1])
                    loads.setdefault(layer, {})[rank] = counts[0]
            figure, panels = plt.subplots(1, len(loads), figsize=(9, 2.4), sharey=True, dpi=60)
            for panel, (layer, by_expert) in zip(panels, sorted(loads.items())):
                panel.bar(list(by_expert), list(by_expert.values()), color=GREEN, hatch="...", edgecolor="white")
                even = sum(by_expert.values()) / len(by_expert)
                panel.axhline(even, color="black", linestyle="--", linewidth=0.8)
                panel.set(title=f"layer {layer}", xlabel="expert", xticks=list(by_expert))
                print(f"layer {layer}: {list(by_expert.values())}, even would be {even:.0f}")
            panels[0].set(ylabel="tokens")
            figure.tight_layout()
            plt.show()"""),
    ("md", """
        *Four panels of four bars around a dashed line, some above, some below. All of a layer's bars together are the batch's
        tokens, twice: each goes to two experts.*"""),
]  # fmt: skip

NOTEBOOKS = {
    "1_benchmarking": BENCHMARKING,
    "2_mixed_precision": PRECISION + MEMORY,
    "3_flash_attention": FLASH,
    "4_ddp": DDP,
    "5_zero": ZERO,
    "6_mesh": MESH,
    "7_planning": [(kind, SWITCH if text == "{switch}" else text) for kind, text in PLANNING],
}


def make(cells: list[tuple[str, str]]) -> nbformat.NotebookNode:
    """A notebook without outputs."""
    book = nbformat.v4.new_notebook()
    book.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for i, (kind, text) in enumerate(cells):
        text = textwrap.dedent(text).strip()
        cell = nbformat.v4.new_markdown_cell(text) if kind == "md" else nbformat.v4.new_code_cell(text)
        cell.id = f"cell-{i}"
        book.cells.append(cell)
    return book


def execute(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run it from the top, here, and keep what it drew."""
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in book.cells:
        cell.metadata = {}
    return book


def build(names: list[str]) -> None:
    if strange := [name for name in names if name not in NOTEBOOKS]:
        sys.exit(f"expected notebooks among {', '.join(NOTEBOOKS)}; got {strange[0]!r}")
    for name in names or NOTEBOOKS:
        nbformat.write(execute(make(NOTEBOOKS[name])), HERE / f"{name}.ipynb")


if __name__ == "__main__":
    build(sys.argv[1:])

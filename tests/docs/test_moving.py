"""Interactive figures in a browser: driven by keys, their texts agree with the kit's numbers.

Must hold: keys reach and move each control. The text below a figure agrees with the cost model, the schedules or the
reference for the chosen values. Readers who want less motion see no play button. Without scripts, no control shows.
axe finds no problem.
"""

import re
from pathlib import Path
from typing import Self

import pytest
import torch

from handout.images.journey import CARD_GB, stops
from handout.images.moving import MOVING, SCORES, VALUES
from lab.cluster.costs import ring_cost, sent_bytes
from lab.cluster.hardware import cluster
from lab.cluster.schedule import check
from lab.course.assignment import ROOT
from lab.measure.roofline import Device, operator_seconds
from reference.ddp.accounting import Link, accounting, best_bucket_bytes
from reference.mesh.mesh import Mesh
from reference.mesh.schedule_interleaved import schedule_interleaved
from reference.zero.accounting import accounting as shares

from .reader import Reader
from .test_site import build

PAGE_OF = {
    "ring": "ddp", "buckets": "ddp", "tiles": "flash_attention", "schedules": "mesh", "grid": "mesh", "growth": "zero",
    "layers": "benchmarking", "journey": "index",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return build(ROOT, "student", tmp_path_factory.mktemp("moving"))


class Figure:
    """One interactive figure on its page."""

    def __init__(self, reader: Reader, site: Path, name: str):
        self.reader, self.box = reader, f"document.querySelector('.moving[data-moving={name}]')"
        reader.open_page(site / f"{PAGE_OF[name]}.html")

    def press(self, label: str, key: str, times: int = 1) -> Self:
        """Reach the control with this label by Tab, and press a key there."""
        self.reader.ask_page(f"{self.box}.querySelector('input, select, button').focus()")
        named = "(a => a.labels?.[0]?.textContent ?? a.ariaLabel ?? a.textContent)(document.activeElement)"
        for _ in range(20):
            if self.reader.ask_page(named) == label:
                break
            self.reader.page.keyboard.press("Tab")
        assert self.reader.ask_page(named) == label, f"Tab does not reach {label}"
        for _ in range(times):
            self.reader.page.keyboard.press(key)
        return self

    def text(self) -> str:
        assert not self.reader.complaints
        return self.reader.ask_page(f"{self.box}.querySelector('.moving-words').textContent")


def numbers(words: str) -> list[float]:
    return [float(n.replace(",", "").replace("−", "-")) for n in re.findall(r"−?\d[\d,]*(?:\.\d+)?", words)]


def approx(*expected: float, digits: int = 2) -> list[object]:
    return [pytest.approx(n, abs=0.51 * 10**-digits) for n in expected]


def test_every_interactive_figure_is_on_its_page(site):
    assert set(PAGE_OF) == {numbers.__name__ for numbers in MOVING}
    for name, page in PAGE_OF.items():
        assert f'data-moving="{name}" hidden' in (site / f"{page}.html").read_text(encoding="utf-8")


def test_ring_figure_matches_cost_model(reader, site):
    figure = Figure(reader, site, "ring").press("Collective", "ArrowDown").press("Ranks W", "ArrowRight")
    got = numbers(figure.press("Step", "ArrowRight", 2).text())
    total_ms = 1e3 * ring_cost("reduce_scatter", 1e6 / 5, 5, 100e-6, 1e-9)
    sent = sent_bytes("reduce_scatter", 1e6 / 5, 5) / 1e3
    assert got[:4] == [2, 4, *approx(total_ms / 2, total_ms)]
    assert got[-1] == pytest.approx(sent / 2, abs=0.1)
    first = reader.ask_page(f"[...{figure.box}.querySelectorAll('svg text.in')].map(t => t.textContent)")
    # Rank 3 has a sum of three: chunk c of rank r starts as (c + 1) · 10^r, and chunk 1 starts at rank 1.
    assert first[3 * 5 + 1] == str(2 * (10 + 100 + 1000))


def test_tiles_figure_ends_with_plain_attention_values(reader, site):
    words = Figure(reader, site, "tiles").press("Visited tiles", "End").text()
    scores, values = torch.tensor(SCORES, dtype=torch.float64), torch.tensor(VALUES, dtype=torch.float64)
    row, keys = scores[6, :7], values[:7]
    m = row.max()
    weights = torch.exp(row - m)
    expected = (m, weights.sum(), weights @ keys, torch.softmax(row, 0) @ keys)
    assert words.startswith("Tile 10 of 10")
    assert words.endswith("its output.")
    assert numbers(words)[2:] == [6, *approx(*map(float, expected), digits=3)]
    figure = Figure(reader, site, "tiles").press("Mask", "ArrowDown").press("Tile", "Home")
    words = figure.press("Visited tiles", "End").text()
    assert words.startswith("Tile 64 of 64")
    out = torch.softmax(scores, -1) @ values
    assert numbers(words)[-1] == pytest.approx(float(out[7]), abs=1e-3)


def test_buckets_figure_matches_reference_accounting(reader, site):
    figure = Figure(reader, site, "buckets").press("Latency α", "ArrowRight").press("Bandwidth 1/β", "ArrowLeft")
    words = figure.press("Bucket", "ArrowRight", 3).text()
    sizes, link = [500_000] * 8, Link(300e-6, 0.5e9)
    step = accounting(sizes, 4, link, variant="bucketed", backward_s=8e-3, bucket_bytes=2_000_000)
    best = best_bucket_bytes(sizes, 4, link, backward_s=8e-3)
    optimum = accounting(sizes, 4, link, variant="bucketed", backward_s=8e-3, bucket_bytes=best)
    expected = approx(1e3 * step.step_s, step.all_reduces, 1e3 * step.exposed_s, best / 1e6, 1e3 * optimum.step_s)
    assert numbers(words) == expected


def test_schedules_figure_matches_schedule_checker(reader, site):
    figure = Figure(reader, site, "schedules").press("Schedule", "ArrowDown", 2).press("Ranks p", "ArrowLeft")
    words = figure.press("Micro-batches m", "Home").press("Chunks v", "ArrowRight").text()
    run = check([schedule_interleaved(rank, 3, 3, 3) for rank in range(3)], 3, 3, 1 / 3, 2 / 3)
    assert numbers(words) == [*approx(run.length), 9, *approx(100 * run.bubble, digits=1), 0, run.live[0]]


def test_growth_figure_matches_reference_memory_shares(reader, site):
    figure = Figure(reader, site, "growth").press("Model", "End").press("Ranks W", "ArrowRight", 4)
    words = figure.press("Precision", "ArrowDown").text()
    assert "On each of 128 ranks" in words
    found = [float(n) * {"G": 1e9, "T": 1e12}[unit] for n, unit in re.findall(r"([\d.]+) ([GT])B", words)]
    methods = ("none", "p_os", "zero2", "zero3")
    expected = [shares([405 * 10**9], 128, method=method, precision="float32").total for method in methods]
    assert found == [pytest.approx(n, rel=0.006) for n in expected]


@pytest.mark.parametrize(("lefts", "typed"), [(0, None), (9, None), (9, 50_257)])
def test_layers_figure_matches_roofline_and_rejects_bad_sizes(reader, site, lefts, typed):
    """The site's script has its own copy of this formula only."""
    figure = Figure(reader, site, "layers").press("Device", "ArrowDown").press("m", "ArrowLeft", lefts)
    figure.press("n", "ArrowRight")
    for wrong in ("", "0", "2.5", "1000001"):
        reader.page.keyboard.type(wrong) if wrong else figure.press("k, any number", "Delete")
        assert "whole numbers from 1" in figure.text(), wrong
        reader.page.keyboard.press("Control+a")
    reader.page.keyboard.type("4096")
    if typed:
        figure.press("n, any number", "Control+a")
        reader.page.keyboard.type(str(typed))
    words = figure.text()
    h100 = cluster("dgx-h100", 8).device
    device = Device(
        flops_per_s=dict.fromkeys((torch.bfloat16, torch.float32), h100.peak_flops), bytes_per_s=h100.hbm_bytes_per_s
    )
    m, k, n = 4096 >> lefts, 4096, typed or 8192
    flops, moved = 2 * m * k * n, 2 * (m * k + k * n + m * n)
    seconds = operator_seconds(device, flops, moved, torch.bfloat16)
    match = re.search(r"At least ([\d.]+) (m|µ)s, bound by (\w+), at ([\d.]+) %", words)
    assert match, words
    assert float(match[1]) * {"m": 1e-3, "µ": 1e-6}[match[2]] == pytest.approx(seconds, rel=0.01)
    assert match[3] == ("memory" if flops / h100.peak_flops < moved / h100.hbm_bytes_per_s else "arithmetic")
    assert float(match[4]) == pytest.approx(100 * flops / seconds / h100.peak_flops, abs=0.06)
    assert f"{round(flops / moved, 1):,g} FLOPs a byte" in words


def test_grid_figure_names_groups_of_the_selected_rank(reader, site):
    words = Figure(reader, site, "grid").press("rank 5", "Enter").text()
    mesh = Mesh(data=2, pipe=2, tensor=2, rank=5)
    position = ", ".join(f"{axis} {index}" for axis, index in mesh.coordinate().items())
    groups = [f"{axis}: {', '.join(map(str, mesh.ranks(axis)))}" for axis in ("data", "pipe", "tensor")]
    assert words.startswith(f"Rank 5 is at {position}.")
    assert all(group in words for group in groups)
    assert "expert: alone" in words


def test_journey_figure_matches_planned_steps_and_alt_text(reader, site):
    reader.set_window(1400, less_motion=True)  # the figure moves only on request
    figure = Figure(reader, site, "journey")
    for i, stop in enumerate(stops()):
        words = figure.press("Step of the way", "ArrowRight", int(i > 0)).text()
        step_s, total_gb = sum(stop.seconds.values()), sum(stop.gb.values())
        assert words.startswith(f"{stop.name}: ")
        assert words.endswith("which fits." if total_gb <= CARD_GB else "which does not fit.")
        assert numbers(words.removeprefix(stop.name)) == [*approx(step_s), *approx(total_gb, digits=0)]
        alternative = reader.ask_page("document.querySelector('figure img').alt")
        text = alternative.replace("takes ", "").replace(" and ", ", ")
        assert f"{step_s:.2f} s, {total_gb:.0f} GB" in text


def test_play_button_runs_to_end_and_is_absent_with_reduced_motion(reader, site):
    figure = Figure(reader, site, "ring").press("Play", "Enter")
    end = f"{figure.box}.querySelector('button').textContent === 'Play'"
    reader.ask_page(f"new Promise(done => {{ const look = () => {end} ? done() : setTimeout(look, 100); look(); }})")
    assert figure.text().startswith("Step 6 of 6")
    reader.set_window(1400, less_motion=True)
    figure = Figure(reader, site, "ring")
    assert reader.ask_page(f"{figure.box}.querySelector('button')") is None
    assert figure.press("Step", "ArrowRight").text().startswith("Step 1 of 6")


def test_figures_fall_back_to_pictures_without_scripts(chromium, site):
    with chromium.new_page(java_script_enabled=False) as page:
        page.goto((site / "ddp.html").as_uri())
        assert page.locator(".moving").count() == 2  # the figures ring and buckets
        assert not any(box.is_visible() for box in page.locator(".moving").all())
        assert page.locator("figure img").first.is_visible()


@pytest.mark.parametrize("page", sorted({*PAGE_OF.values(), "benchmarking", "glossary", "published", "search"}))
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)], ids=["desk", "phone, dark"])
def test_pages_have_no_accessibility_violations(reader, site, page, width, dark):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not here: pip install -e .[browser]"
    )
    reader.set_window(width, dark)
    reader.open_page(site / f"{page}.html")
    found = axe.Axe().run(reader.page)
    assert not found.violations_count, found.generate_report()

"""The site's additions to Sphinx: exercise cards and boxes, captions, interactive figures, and mathematics as MathML.

Chapters are also read on code hosts. In Markdown a figure is therefore an image and a paragraph that begins with
**Figure 1.**; the site turns them into a figure with a caption. An exercise is a section with a card; the site turns it
into a box. A figure is interactive if moving/ has numbers with its image's name, and static/moving/ a script.
"""

import html
import re
from pathlib import Path, PurePosixPath

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from lab.course.assignment import AssignmentError, Exercise, default

from . import cards
from .stage import anchor, code_of, heading


class Card(SphinxDirective):
    """An exercise's points and needs; below its text, its tests and its interface or solution.

    The directive's body is the line that code hosts show. It must agree with assignment.toml.
    """

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            e = default().exercise(self.arguments[0])
        except AssignmentError as error:
            raise self.error(str(error)) from None
        if "\n".join(self.content) != cards.line(e):
            raise self.error(f"{e.id}: not what assignment.toml says; run python -m handout.site --cards")
        edition = self.config.edition
        box = nodes.container(classes=["exercise-card"])
        box += self.parse_text_to_nodes(_facts(e, set(default().of_profile(self.config.profile).exercises)))
        details = nodes.container(classes=["exercise-more"])
        details += _folded("What judges it", self.parse_text_to_nodes(_judged(e)))
        if e.forbidden and not cards.lists_forbidden(e):
            names = ", ".join(f"`{name}`" for name in e.forbidden)
            details += _folded("Forbidden calls", self.parse_text_to_nodes(names))
        title = "Solution" if edition == "solutions" else "Interface"
        code = nodes.literal_block(text := code_of(e.file, edition), text, language="python")
        code_box = nodes.container(ids=[anchor(e.id)], names=[anchor(e.id)])
        self.state.document.note_explicit_target(code_box)
        code_box += _folded(f"{title}: {e.file}", [code], unfolded=edition == "student")
        details += code_box
        return [box, details]


def _facts(e: Exercise, kept: set[str]) -> str:
    """The card's head in Markdown. Needs that are not in `kept` have no section, so they get no link."""
    needs = [f"[`{id}`]({heading(id)})" if id in kept else f"`{id}`" for id in e.needs]
    stars = "●" * e.difficulty + "○" * (5 - e.difficulty)
    machine = "a GPU" if e.track == "gpu" else "a laptop"
    rows = [
        f"{cards.counted(e.points, 'point')} · {cards.counted(e.hours, 'hour')} · "
        f"difficulty {stars} ({e.difficulty} of 5) · on {machine}",
        f"Builds on: {', '.join(needs) or 'no other exercise'}.",
        f"Hand in: `student/{e.file}` with `{e.name}`. `lab check {e.id}` says whether it is done.",
    ]
    return "\n\n".join(rows)


def _judged(e: Exercise) -> str:
    """A Markdown list of the tests by kind, with the names of tests in words."""
    return "\n".join(
        f"- *{kind}*, {cards.counted(round(points, 1), 'point')}: {'; '.join(names)}."
        for kind, (points, names) in cards.tests_by_kind(e).items()
    )


def _folded(title: str, children: list[nodes.Node], unfolded: bool = False) -> list[nodes.Node]:
    opened = " open" if unfolded else ""
    head = f"<details{opened}><summary>{html.escape(title)}</summary>"
    return [nodes.raw("", head, format="html"), *children, nodes.raw("", "</details>", format="html")]


NUMBERS = Path(__file__).resolve().parent / "moving"


class Captions(SphinxTransform):
    """A paragraph "Figure 1. …" below an image becomes its caption; an exercise's section becomes its box."""

    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            paragraph, caption = image.parent, image.parent.next_node(descend=False, siblings=True)
            if isinstance(caption, nodes.paragraph) and caption.astext().startswith("Figure "):
                caption.parent.remove(caption)
                number = nodes.make_id(caption.astext().partition(".")[0])
                figure = nodes.figure("", image, nodes.caption("", "", *caption.children), ids=[number])
                paragraph.replace_self(figure)
                figure += _moving(PurePosixPath(image["uri"]).stem)
        for details in [box for box in self.document.findall(nodes.container) if "exercise-more" in box["classes"]]:
            section = details.parent
            section.remove(details)
            section += details
            section["classes"].append("exercise")


def _moving(name: str) -> list[nodes.Node]:
    """The numbers that make this figure interactive, in an element that stays hidden without its script."""
    numbers = NUMBERS / f"{name}.json"
    if not numbers.is_file():
        return []
    data = numbers.read_text(encoding="utf-8").strip().replace("<", "\\u003c")
    markup = f'<div class="moving" data-moving="{name}" hidden><script type="application/json">{data}</script></div>'
    return [nodes.raw("", markup, format="html", moving=name)]


def _add_scripts(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Add to each page only the scripts of its own interactive figures."""
    raw = doctree.findall(nodes.raw) if doctree and app.builder.name == "html" else ()
    for name in dict.fromkeys(node["moving"] for node in raw if "moving" in node):
        app.add_js_file("moving/moving.js", loading_method="defer")
        app.add_js_file(f"moving/{name}.js", priority=600, loading_method="defer")


_ACCESSIBLE = (  # attributes for screen readers that the theme and Sphinx leave out
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Contents of the site">'),
    ('<aside class="toc-drawer">', '<aside class="toc-drawer" aria-label="Contents of the page">'),
    ('<aside class="toc-drawer no-toc">', '<aside class="toc-drawer no-toc" aria-label="Contents of the page">'),
    ('<th class="head"><p></p></th>', "<td></td>"),
)


def _mend(app: Sphinx, error: Exception | None) -> None:
    """Apply _ACCESSIBLE to the written pages, since the theme's templates do not allow it."""
    for page in Path(app.outdir).rglob("*.html") if error is None else ():
        text = page.read_text(encoding="utf-8")
        for old, new in _ACCESSIBLE:
            text = text.replace(old, new)
        page.write_text(text, encoding="utf-8")


def mathml(latex: str, display: str) -> str:
    return convert(latex, display=display).replace("<math ", f'<math alttext="{html.escape(latex.strip())}" ', 1)


def inline_math(self, node: nodes.math) -> None:
    self.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def displayed_math(self, node: nodes.math_block) -> None:
    """Write an equation on its own line, with its number, from \\tag{n}, at the right."""
    latex = node.astext()
    tag = re.search(r"\\tag\{(.+?)\}", latex)
    number = f'<span class="number">({html.escape(tag[1])})</span>' if tag else ""
    latex = latex.replace(tag[0], "") if tag else latex
    self.body.append(f'<div class="equation">{mathml(latex, "block")}{number}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("edition", "student", "env")
    app.add_config_value("profile", "full", "env")
    app.add_directive("exercise", Card)
    app.add_transform(Captions)
    app.connect("html-page-context", _add_scripts)
    app.connect("build-finished", _mend)
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(displayed_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

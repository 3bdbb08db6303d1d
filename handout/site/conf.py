"""Sphinx' settings. No page needs a network; MathML needs no script."""

from lab.course.assignment import default

project = default().title
author = ""
extensions = ["myst_nb", "handout.site.extension"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_render_image_options = {"alt": "what the cell above drew; the text below it says the same"}
highlight_language = "none"

templates_path = ["templates"]
html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["page.js"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}

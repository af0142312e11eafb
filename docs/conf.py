"""How `make docs` builds the site."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import pytorch_accelerated

project = "pytorch-accelerated"
author = "the pytorch-accelerated maintainers"
copyright = f"{author}, Apache-2.0"
version = release = pytorch_accelerated.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "design/README.md"]  # design/index.md includes it
root_doc = "index"
language = "en"

# Pages are Markdown that GitHub shows as well.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Notebooks have their outputs stored: `make notebooks` runs them.
nb_execution_mode = "off"

# Docstrings: Google style, names in single backticks. A name that is in the reference becomes a link.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
# Both APIs have a `Trainer`, a `TrainerCallback` ...; a name without its module means the native one.
suppress_warnings = ["ref.python"]
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "pytorch-accelerated"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/mark.svg"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_logo": "mark.svg",
    "dark_logo": "mark.svg",
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#c2410c", "color-brand-content": "#b33a0a"},
    "dark_css_variables": {"color-brand-primary": "#fb923c", "color-brand-content": "#fdba74"},
}
copybutton_exclude = ".linenos, .gp, .go"


def setup(app):
    app.connect("source-read", offer_files_outside)
    app.connect("html-page-context", name_language)


def offer_files_outside(app, docname, source):
    """Links from a page to code and results, which GitHub follows, become downloads: they are not pages of the site."""
    folder = (Path(app.srcdir) / docname).parent

    def as_download(link):
        path = (folder / link[1]).resolve()
        return link[0] if path.is_relative_to(app.srcdir) or not path.is_file() else f"](<path:{link[1]}>)"

    source[0] = re.sub(r"\]\((\.\.?/[^)#\s]+)\)", as_download, source[0])


def name_language(app, pagename, templatename, context, doctree):
    """Browsers choose the forms of characters, and screen readers the voice, by the language of a page."""
    if pagename.startswith("zh/"):
        context["language"] = "zh-CN"

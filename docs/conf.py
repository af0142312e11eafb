"""How `make docs` builds the site."""

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.domains.python import PyObject
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import pytorch_accelerated
from pytorch_accelerated.__main__ import main

project = "pytorch-accelerated"
author = "the pytorch-accelerated maintainers"
copyright = f"{author}, Apache-2.0"
version = release = pytorch_accelerated.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
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
# Where Read the Docs builds the site (.readthedocs.yaml), pages link to their source. The host adds a version switch.
if repository := os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git"):
    html_theme_options |= {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
copybutton_exclude = ".linenos, .gp, .go"


for field in PyObject.doc_field_types:
    if field.name == "variable":  # "Variables:" by default
        field.label = "Attributes"


def setup(app):
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-bases", keep_public_bases)
    app.connect("autodoc-skip-member", skip_fields_of_tuples)
    app.connect("doctree-read", remove_empty_bases)
    app.connect("missing-reference", find_in_other_modules)
    app.connect("doctree-resolved", link_names)
    app.connect("source-read", offer_files_outside)
    app.connect("html-page-context", name_language)
    app.connect("doctree-read", add_dark_pictures)
    app.connect("build-finished", write_markdown)


class CommandHelp(Directive):
    """What ``python -m pytorch_accelerated`` prints for a command followed by ``--help``."""

    optional_arguments = 2

    def run(self):
        os.environ["COLUMNS"] = "88"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*self.arguments, "--help"])
        return [nodes.literal_block(text=printed.getvalue().strip(), language="text")]


def keep_public_bases(app, name, obj, options, bases):
    """A base that is not in the reference gives way to its own bases."""
    bases[:] = dict.fromkeys(shown for base in bases for shown in public_bases(base))


def public_bases(base):
    if base is object:
        return []
    module = ".".join(base.__module__.split(".")[:2])
    if not module.startswith("pytorch_accelerated") or hasattr(importlib.import_module(module), base.__name__):
        return [base]
    return [shown for parent in base.__bases__ for shown in public_bases(parent)]


def find_in_other_modules(app, env, node, contnode):
    """Docstrings write `Trainer.find_lr` or `find_lr` without its module: that of the same API, if there is one."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"]
    if "." not in name and not name[:1].isupper():
        name = f"Trainer.{name}"
    return link_to_reference(
        app, name, node["refdoc"], contnode, hugging_face=node["refdoc"] == "reference/huggingface"
    )


# Pages of which the names without a module are those of the Hugging Face API.
HUGGING_FACE_PAGES = {"coming_from/transformers", "how_to/transformers_models", "zh/huggingface"}


def link_names(app, doctree, docname):
    """On pages, classes in backquotes, and methods and hooks of the trainer, become links."""
    hugging_face = docname in HUGGING_FACE_PAGES
    if docname.startswith(("reference/", "design/")):
        return
    linked = set()
    for literal in list(doctree.findall(nodes.literal)):
        name = name_on_page(literal.astext(), is_about_others=docname.startswith("coming_from/") and not hugging_face)
        place = id(literal.parent.parent), name
        if name is None or place in linked or isinstance(literal.parent, (nodes.reference, nodes.title)):
            continue
        link = link_to_reference(app, name, docname, literal.deepcopy(), hugging_face)
        if link is not None:
            literal.replace_self(link)
            linked.add(place)


def name_on_page(text, is_about_others):
    """What to look up for a text in backquotes. Pages about other libraries have their `Trainer` and `fit` as well."""
    match = re.fullmatch(r"(trainer\.)?([A-Za-z]\w+(?:\.[a-z]\w*)?)(\(.*\))?", text)
    if match is None:
        return None
    name = match[2]
    if name[0].isupper():
        return None if is_about_others and name.startswith("Trainer") else name
    if is_about_others:
        return None
    if name.startswith("on_"):
        return f"TrainerCallback.{name}"
    if name in pytorch_accelerated.__all__:
        return f"pytorch_accelerated.{name}"
    is_method = match[1] or (match[3] and name != "print") or "_" in name
    return f"Trainer.{name}" if is_method else None


def link_to_reference(app, name, docname, shown, hugging_face):
    """A link to the entry of the name, if there is only one of the native or of the Hugging Face API."""
    entries = app.env.domains.python_domain.objects.items()
    found = [(full, entry) for full, entry in entries if f".{full}".endswith(f".{name}") and not entry.aliased]
    of_face = [(full, entry) for full, entry in found if ".huggingface." in full]
    others = [(full, entry) for full, entry in found if ".huggingface." not in full]
    places = {entry.node_id: entry for _, entry in (hugging_face and of_face) or others}
    if len(places) != 1:
        return None
    (entry,) = places.values()
    return make_refnode(app.builder, docname, entry.docname, entry.node_id, shown, name)


def remove_empty_bases(app, doctree):
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if paragraph.astext().strip() == "Bases:":
            paragraph.parent.remove(paragraph)


def skip_fields_of_tuples(app, what, name, obj, skip, options):
    """Fields of a `NamedTuple` are described by its docstring; their own only say their number."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def offer_files_outside(app, docname, source):
    """Links from a page to code and results, which GitHub follows, become downloads: they are not pages of the site."""
    folder = (Path(app.srcdir) / docname).parent

    def as_download(link):
        path = (folder / link[1]).resolve()
        stays = path.is_relative_to(app.srcdir) or not path.is_file() or path.suffix == ".png"  # pictures are copied
        return link[0] if stays else f"](<path:{link[1]}>)"

    source[0] = re.sub(r"\]\((\.\.?/[^)#\s]+)\)", as_download, source[0])


def name_language(app, pagename, templatename, context, doctree):
    """Browsers choose the forms of characters, and screen readers the voice, by the language of a page."""
    if pagename.startswith("zh/"):
        context["language"] = "zh-CN"


def add_dark_pictures(app, doctree):
    """A picture with a dark version beside it, NAME-dark.png, is shown in the mode that fits."""
    for image in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir) / image["uri"]
        dark = path.with_name(f"{path.stem}-dark{path.suffix}")
        if image["classes"] or not dark.is_file():
            continue
        other = image.deepcopy()
        other["uri"] = dark.relative_to(app.srcdir).as_posix()
        other["candidates"] = {"*": other["uri"]}
        image["classes"], other["classes"] = ["only-light"], ["only-dark"]
        image.parent.insert(image.parent.index(image) + 1, other)
        app.env.images.add_file(app.env.docname, other["uri"])


def write_markdown(app, exception):
    """Each page also as the Markdown that it is made from, and ``llms.txt``, the guide and a list of them."""
    if exception is not None or app.builder.name != "html":
        return
    guide = Path(__file__).parents[1] / "src" / "pytorch_accelerated" / "guide.md"
    lines = [guide.read_text(encoding="utf-8"), "## Pages", ""]
    for name in sorted(app.env.found_docs, key=lambda name: (name.count("/"), name)):
        source = Path(app.env.doc2path(name))
        if source.suffix != ".md" or name.startswith("zh/"):
            continue
        target = Path(app.outdir) / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        lines.append(f"- [{app.env.titles[name].astext()}]({name}.md)")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

"""Sphinx's configuration: `make docs` builds the site into build/docs."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

from torchrec_hkv import __version__  # noqa: E402

project = "torchrec_hkv"
author = "the torchrec_hkv authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "command_help",
    "op_schemas",
]
root_doc = "index"
# README.md is the index on GitHub; index.md includes it.
exclude_patterns = ["README.md"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4

# Members of these classes are in the documentation of torch and TorchRec.
INHERITED_FROM = (
    "Module, DistributedModelParallel, DMPCollection, BaseEmbeddingCollection, "
    "EmbeddingBagCollection, EmbeddingCollection, Optimizer, object, tuple"
)
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "inherited-members": INHERITED_FROM,
    "show-inheritance": True,
    "member-order": "bysource",
}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"torchrec_hkv {release}"
html_show_copyright = False

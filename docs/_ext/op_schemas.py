"""The directive ``ops``: the schemas of the package's torch operators.

    ```{ops} find find_or_insert
    ```

shows those that are named. The build warns of an operator that no page shows.
"""

from __future__ import annotations

from typing import Any

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import torchrec_hkv  # noqa: F401  (registers the operators)

NAMESPACE = "torchrec_hkv::"


def schemas() -> dict[str, str]:
    """The schema of each operator, by its name without the namespace."""
    return {
        schema.name.removeprefix(NAMESPACE): str(schema).removeprefix(NAMESPACE)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(NAMESPACE)
    }


class Ops(SphinxDirective):
    """Shows the schemas of the operators that its argument names."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        known = schemas()
        shown = self.env.metadata[self.env.docname].setdefault("ops", "")
        content = []
        for name in self.arguments[0].split():
            if name not in known:
                raise self.error(f"There is no operator {name!r}; there are {sorted(known)}.")
            content.append(nodes.literal_block(known[name], known[name], language="text"))
            shown += f" {name}"
        self.env.metadata[self.env.docname]["ops"] = shown
        return content


def check_all_are_shown(app: Sphinx, environment: Any) -> None:
    """Warns of operators that no page shows."""
    shown = " ".join(data.get("ops", "") for data in environment.metadata.values()).split()
    missing = sorted(set(schemas()) - set(shown))
    if missing:
        logging.getLogger(__name__).warning("no page shows the operators %s", ", ".join(missing))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive with Sphinx."""
    app.add_directive("ops", Ops)
    app.connect("env-check-consistency", check_all_are_shown)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

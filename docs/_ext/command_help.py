"""The directive ``command-help``: what ``torchrec-hkv VERB --help`` prints.

```{command-help} plan
```
"""

from __future__ import annotations

import contextlib
import io
import os

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from torchrec_hkv.cli import main


class CommandHelp(SphinxDirective):
    """Shows the help of the verb that its argument names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        output = io.StringIO()
        os.environ["COLUMNS"] = "100"  # argparse's lines are as wide as a terminal
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main([self.arguments[0], "--help"])
        text = output.getvalue()
        if not text:
            raise self.error(f"torchrec-hkv has no verb {self.arguments[0]!r}.")
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive with Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

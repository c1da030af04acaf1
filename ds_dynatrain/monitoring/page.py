"""The web page: one document that contains everything it needs and sends requests only to this server.

`static/` holds the parts of the page. uPlot is an unmodified copy from npm (`npm pack uplot@1.6.32`), with its licence.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

STATIC = Path(__file__).parent / "static"
STYLES, SCRIPTS = ("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _page() -> bytes:
    """Return the page as one HTML document, with its styles and scripts inside."""
    styles = "".join(f"<style>{_text(name)}</style>" for name in STYLES)
    scripts = "".join(f"<script>{_text(name)}</script>" for name in SCRIPTS)
    body = _text("page.html").replace("<!-- styles -->", styles).replace("<!-- scripts -->", scripts)
    return body.encode()


def _policy() -> str:
    """Return the page's content security policy: it may run its own scripts, and send requests to this server."""

    def hashes(names: tuple[str, ...]) -> str:
        digests = (hashlib.sha256(_text(name).encode()).digest() for name in names)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(SCRIPTS)}; style-src {hashes(STYLES)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


PAGE = _page()
POLICY = _policy()

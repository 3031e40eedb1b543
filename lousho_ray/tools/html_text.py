"""A web page as readable text: one line per block, links as `text (url)`, no scripts and styles."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "object", "head"})
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote body br caption center dd details dialog div dl dt fieldset figcaption figure footer "
        "form h1 h2 h3 h4 h5 h6 header hr li main nav ol option p pre section summary table tbody tfoot thead title tr ul",
    )
)
_CELLS = frozenset({"td", "th"})


def html_to_text(html: str, base_url: str = "") -> str:
    """The text of a page. Links are made absolute against `base_url`; entities are resolved."""
    reader = _Reader(base_url)
    reader.feed(html)
    reader.close()
    return reader.text()


class _Reader(HTMLParser):
    def __init__(self, base_url: str) -> None:
        super().__init__(convert_charrefs=True)
        self._base_url = base_url
        self._lines: list[str] = []
        self._line: list[str] = []
        self._links: list[tuple[str | None, int]] = []
        self._skipping: list[str] = []
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and self._skipping == ["head"]:
            self._skipping.append("title")
        elif self._skipping or tag in _SKIPPED:
            if tag in _SKIPPED and tag not in self._skipping:
                self._skipping.append(tag)
            if tag == "body":  # a head that was never closed
                self._skipping.clear()
        elif tag in _BLOCKS:
            self._end_line()
            self._preformatted += tag == "pre"
            if tag == "li":
                self._line.append("- ")
        elif tag in _CELLS and self._line:
            self._line.append(" | ")
        elif tag == "a":
            self._links.append((dict(attrs).get("href"), len(self._line)))

    def handle_endtag(self, tag: str) -> None:
        if tag == "title" and self._skipping == ["head", "title"]:
            self._end_line()
        if tag in self._skipping:
            del self._skipping[self._skipping.index(tag) :]
        elif self._skipping:
            return
        elif tag in _BLOCKS:
            self._end_line()
            self._preformatted = max(0, self._preformatted - (tag == "pre"))
        elif tag == "a" and self._links:
            self._end_link(*self._links.pop())

    def handle_data(self, data: str) -> None:
        if self._skipping and self._skipping != ["head", "title"]:
            return
        if self._preformatted:
            *whole, last = data.split("\n")
            for line in whole:
                self._line.append(line)
                self._end_line()
            self._line.append(last)
        else:
            self._line.append(re.sub(r"\s+", " ", data))

    def _end_link(self, href: str | None, start: int) -> None:
        text = "".join(self._line[start:]).strip()
        if not href or href.startswith("#") or href.lower().startswith(("javascript:", "data:")):
            return
        try:
            url = urljoin(self._base_url, href.strip())
        except ValueError:
            url = href.strip()
        if text and text != url:
            self._line.append(f" ({url})")

    def _end_line(self) -> None:
        line = "".join(self._line)
        line = line.rstrip() if self._preformatted else re.sub(r" {2,}", " ", line).strip()
        if line and line != "-":
            self._lines.append(line)
        self._line = []
        self._links = [(href, 0) for href, _ in self._links]

    def text(self) -> str:
        self._end_line()
        return "\n".join(self._lines)

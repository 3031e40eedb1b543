"""A web page as readable text: one line per block, links as `text (url)`, no scripts and styles.

The pages are written by strangers, so every page takes time linear in its length; `html.parser` works an hour on some of 2 MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from urllib.parse import urljoin

_RAW = frozenset({"script", "style", "noscript", "iframe", "noembed", "noframes", "xmp", "template", "textarea", "title"})
"""Elements that end at their own end tag only, whatever looks like a tag in them."""

_SKIPPED = _RAW - {"title", "xmp", "textarea"}
_HIDDEN = frozenset({"svg", "object", "math", "select"})
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote body br caption center dd details dialog div dl dt fieldset figcaption figure footer "
        "form h1 h2 h3 h4 h5 h6 head header hr li main nav ol option p pre section summary table tbody tfoot thead tr ul",
    )
)
_CELLS = frozenset({"td", "th"})

_NAME = re.compile(r"[a-zA-Z][^\s/>]*")
_UNTIL_QUOTE_OR_END = re.compile(r"[^\"'>]*")
_HREF = re.compile(r"(?<![\w-])href\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))", re.IGNORECASE)
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class _Tag:
    name: str
    opens: bool
    attributes: str = ""


def html_to_text(html: str, base_url: str = "", max_chars: int | None = None) -> str:
    """The text of a page. Links are made absolute against `base_url`; entities are resolved.

    With `max_chars` reading stops soon after that many characters of text.
    """
    page = _Page(base_url)
    for token in _tokens(html):
        if isinstance(token, str):
            page.add_text(token)
        elif token.opens:
            page.open(token.name, token.attributes)
        else:
            page.close(token.name)
        if max_chars is not None and page.chars > max_chars:
            break
    return page.text()


def _tokens(html: str) -> Iterator[str | _Tag]:
    """Texts and tags in order. Ends where a comment, tag or raw element is never closed."""
    position = 0
    while True:
        start = html.find("<", position)
        if start < 0:
            yield html[position:]
            return
        if start > position:
            yield html[position:start]
        name = _NAME.match(html, start + 2 if html.startswith("</", start) else start + 1)
        if name is not None:
            end = _tag_end(html, name.end())
            if end < 0:
                return
            opens, tag = html[start + 1] != "/", name[0].lower()
            yield _Tag(tag, opens, html[name.end() : end])
            position = end + 1
            if opens and tag in _RAW:
                raw = re.compile(f"</{re.escape(tag)}(?=[\\s/>])", re.IGNORECASE).search(html, position)
                if raw is None:
                    return
                if tag not in _SKIPPED:
                    yield html[position : raw.start()]
                position = raw.start()
        elif html.startswith(("<!", "<?", "</"), start):
            closing = "-->" if html.startswith("<!--", start) else ">"
            end = html.find(closing, start + 2)
            if end < 0:
                return
            position = end + len(closing)
        else:
            yield "<"
            position = start + 1


def _tag_end(html: str, position: int) -> int:
    """Where the `>` of a tag is, past quoted attribute values; -1 = nowhere."""
    while True:
        found = _UNTIL_QUOTE_OR_END.match(html, position)
        assert found is not None
        stop = found.end()
        if stop == len(html):
            return -1
        if html[stop] == ">":
            return stop
        position = stop + 1
        if found[0].rstrip().endswith("="):
            position = html.find(html[stop], position) + 1
            if position == 0:
                return -1


class _Page:
    """Gathers the lines of a page."""

    def __init__(self, base_url: str) -> None:
        self.chars = 0
        self._base_url = base_url
        self._lines: list[str] = []
        self._line: list[str] = []
        self._link: tuple[str, int] | None = None
        self._hidden_in = ""
        self._preformatted = False

    def open(self, tag: str, attributes: str) -> None:
        if self._hidden_in:
            return
        if tag in _HIDDEN:
            self._hidden_in = tag
        elif tag in _BLOCKS or tag == "title":
            self._end_line()
            self._preformatted = self._preformatted or tag == "pre"
            if tag == "li":
                self._line.append("- ")
        elif tag in _CELLS and self._line:
            self._line.append(" | ")
        elif tag == "a":
            self._end_link()
            href = _HREF.search(attributes)
            self._link = None if href is None else (_unescaped(href[1] or href[2] or href[3] or ""), len(self._line))

    def close(self, tag: str) -> None:
        if self._hidden_in:
            self._hidden_in = "" if tag == self._hidden_in else self._hidden_in
        elif tag in _BLOCKS or tag == "title":
            self._end_line()
            self._preformatted = self._preformatted and tag != "pre"
        elif tag == "a":
            self._end_link()

    def add_text(self, text: str) -> None:
        if self._hidden_in:
            return
        text = _unescaped(text)
        self.chars += len(text)
        if not self._preformatted:
            self._line.append(_SPACE.sub(" ", text))
            return
        *whole, last = text.split("\n")
        for line in whole:
            self._line.append(line)
            self._end_line()
        self._line.append(last)

    def _end_link(self) -> None:
        if self._link is None:
            return
        (href, start), self._link = self._link, None
        shown = "".join(self._line[start:]).strip()
        if not shown or not href.strip() or href.startswith("#") or href.lower().startswith(("javascript:", "data:")):
            return
        try:
            url = urljoin(self._base_url, href.strip())
        except ValueError:
            url = href.strip()
        if shown != url:
            self._line.append(f" ({url})")
            self.chars += len(url)

    def _end_line(self) -> None:
        line = "".join(self._line)
        line = line.rstrip() if self._preformatted else _SPACE.sub(" ", line).strip()
        if line and line != "-":
            self._lines.append(line)
        self._line = []
        if self._link is not None:
            self._link = (self._link[0], 0)

    def text(self) -> str:
        self._end_link()
        self._end_line()
        return "\n".join(self._lines)


def _unescaped(text: str) -> str:
    try:
        return unescape(text)
    except ValueError:  # a character number of thousands of digits
        return text

"""Web pages as text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.tools.html_text import html_to_text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<p>One <b>two</b>\n three", "One two three"),
        ("<P CLASS='x'>A</P><DIV>B</DIV>", "A\nB"),
        ("<ul><li>a<li>b<li></ul>", "- a\n- b"),
        ("<table><tr><th>x<td>y<tr><td>z</table>", "x | y\nz"),
        ("<pre>  a\n    b </pre>c  d", "  a\n    b\nc d"),
        ("a &amp; b &lt;c&gt; &eacute; &#233; &#xe9; &nope; &amp", "a & b <c> é é é &nope; &"),
        ("<script>if (a < b) { '</p>' }</script>x<style>p{}</style>y<SCRIPT>z</SCRIPT >", "xy"),
        ("<title>T &amp; t</title><textarea><b>raw</b></textarea>", "T & t\n<b>raw</b>"),
        ("<noscript>no</noscript><template><p>no</template><svg><text>no</text></svg>yes", "yes"),
        ("<!doctype html><!-- <p>no</p> --><?xml x?>yes<!---->!", "yes!"),
        ("1 < 2 <3 <>", "1 < 2 <3 <>"),
        ("<p title='a > b' data-x=\"</p>\">yes", "yes"),
        ("<p it's>yes", "yes"),
        ("yes<p", "yes"),
        ("yes<script>no", "yes"),
        ("yes<!-- no", "yes"),
        ("yes<a x='no", "yes"),
        ("", ""),
    ],
)
def test_pages(html: str, text: str) -> None:  # HTTP-07
    assert html_to_text(html) == text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<a href=/b>t</a>", "t (https://x.example/b)"),
        ("<a class=y HREF = 'b?a=1&amp;b=2'>t</a>", "t (https://x.example/a/b?a=1&b=2)"),
        ('<a data-href="no" href="https://y.example/">t</a>', "t (https://y.example/)"),
        ("<a href='#top'>t</a> <a href='JavaScript:x()'>u</a> <a>v</a> <a href=''>w</a>", "t u v w"),
        ("<a href=/b><img></a>", ""),
        ("<a href='https://y.example/'>https://y.example/</a>", "https://y.example/"),
        ("<a href=/b><div>t</div></a>", "t"),
        ("<a href=/b>t<a href=/c>u</a>", "t (https://x.example/b)u (https://x.example/c)"),
        ("<a href='http://[bad'>t</a>", "t (http://[bad)"),
    ],
)
def test_links(html: str, text: str) -> None:  # HTTP-07
    assert html_to_text(html, "https://x.example/a/") == text


def test_reading_stops_soon_after_enough_text() -> None:
    text = html_to_text("<p>word</p>" * 1_000_000, max_chars=100)
    assert 100 < len(text) < 200


PIECES = [
    "<!",
    "<!--",
    "<!-",
    "<?",
    "<![CDATA[",
    "<",
    "</",
    "<a",
    "<a ",
    "</a ",
    "<a x=",
    "<a x='",
    "<a x='>",
    "<a href=x>",
    "<a href=x><p>",
]
PIECES += [
    "<script>",
    "<script></scr",
    "<svg>",
    "<pre>",
    "<li>",
    "<td>",
    "&",
    "&#",
    "&#9",
    "--!>",
    "=",
    "'",
    "<a href=' ",
    "href= ",
    "\n",
    " ",
]


@pytest.mark.parametrize("before", ["", "<!--", "<script>", "<a ", "<pre>", "&#"])
def test_no_page_takes_more_than_linear_time(before: str) -> None:
    # Two lengths: what grows with the square of the length takes 100 times as long for the second.
    for piece in PIECES:
        times = []
        for length in (20_000, 200_000):
            page = before + piece * (length // len(piece))
            start = time.process_time()
            html_to_text(page, "https://x.example/")
            times.append(time.process_time() - start)
        assert times[1] < max(0.5, 40 * times[0]), (before, piece)


@given(st.text(alphabet="<>/!-'\"=& aprescitlhf#9;\n", max_size=80))
def test_any_text_is_read(html: str) -> None:
    assert isinstance(html_to_text(html, "https://x.example/"), str)

"""The event-stream parser."""

from __future__ import annotations

import random

import pytest

from lousho_ray.providers.sse import ServerSentEvent, SSEDecoder
from lousho_ray.providers.transcript import TextJoiner


def decode(*reads: bytes) -> list[ServerSentEvent]:
    decoder = SSEDecoder()
    events = [event for read in reads for event in decoder.feed(read)]
    return events + decoder.close()


def data_of(*reads: bytes) -> list[str]:
    return [event.data for event in decode(*reads)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"data: a\n\ndata:b\n\n", ["a", "b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b'data: {"a":\ndata: 1}\n\n', ['{"a":\n1}']),
        (b"data:  two blanks\n\n", [" two blanks"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b": note\n\n: note\n\ndata: a\n\n", ["a"]),
        (b"id: 1\nretry: 5\ndata: a\n\n", ["a"]),
        (b"data\n\n", [""]),
        (b"event: x\n\ndata: a\n\n", ["a"]),
        (b"data: a\x0bb\xc2\x85c\xe2\x80\xa8d\n\n", ["a\x0bb\x85c\u2028d"]),
        (b"", []),
    ],
)
def test_the_grammar_holds_however_the_bytes_are_cut(body: bytes, expected: list[str]) -> None:
    # Field cases W19, W20
    assert data_of(body) == expected
    assert data_of(*[body[i : i + 1] for i in range(len(body))]) == expected
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(len(body) + 1), k=min(3, len(body) + 1)))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        assert data_of(*pieces) == expected


def test_characters_cut_by_a_read_are_whole() -> None:
    # Field case W20
    text = "naïve 漢字 🧑🏽‍🚀"
    body = f"data: {text}\n\n".encode()
    assert data_of(*[bytes([byte]) for byte in body]) == [text]


def test_an_event_has_its_name_only() -> None:
    assert decode(b"event: ping\ndata: 1\n\ndata: 2\n\n") == [ServerSentEvent("1", "ping"), ServerSentEvent("2", "")]


def test_comments_are_counted_as_signs_of_life() -> None:
    # Field case W23
    decoder = SSEDecoder()
    assert decoder.feed(b": OPENROUTER PROCESSING\n\n: ping\n") == []
    assert decoder.comments == 2


def test_the_last_event_counts_without_its_blank_line_but_not_without_its_line_end() -> None:
    assert data_of(b"data: a\n\ndata: b\n") == ["a", "b"]
    assert data_of(b"data: a\n\ndata: b") == ["a"]


def test_surrogate_halves_join_across_fragments_and_lone_ones_are_replaced() -> None:
    # Field case W22
    joiner = TextJoiner()
    assert [joiner.push("a\ud83d"), joiner.push("\ude00b"), joiner.push("\udc00c"), joiner.push("d\ud83d")] == [
        "a",
        "😀b",
        "\ufffdc",
        "d",
    ]
    assert joiner.push("e") == "\ufffde"
    joiner.push("\ud83d")
    assert joiner.close() == "\ufffd"
    assert joiner.close() == ""

"""Token estimates."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lousho_ray import tokens
from lousho_ray.messages import ImagePart, Message, TextPart, ToolCall, assistant, user
from lousho_ray.ports import GenerateOptions, ToolDefinition
from lousho_ray.tokens import estimate_request_tokens, estimate_tokens, set_token_estimator

# Counted with the o200k_base and cl100k_base encodings.
PROSE = {
    "story": (
        "The harbour was quiet that morning, apart from the gulls and a single fishing boat that had come in late. Marta walked "
        "along the quay with her hands in her pockets and thought about the letter she had not yet answered. Her brother wanted "
        "her to sell the house. He had never liked it, and since their mother's death he had found more reasons every week: the "
        "roof, the damp, the price of heating oil. She could not say that he was wrong. But every time she sat down to write "
        "back, she looked out of the kitchen window at the pear tree and put the pen away again.",
        (122, 125),
    ),
    "essay": (
        "A good test suite tells you quickly whether a change broke something that worked before. It does not tell you that the "
        "program is correct, and nobody should expect that of it. What matters most is that people trust it: when a test fails "
        "they look at their change first, and when it passes they go on without a second thought. Tests that fail now and then "
        "for no reason destroy this trust faster than missing tests do.",
        (85, 85),
    ),
}


@pytest.fixture(autouse=True)
def _restore_estimator() -> Iterator[None]:
    before = set_token_estimator(None)
    yield
    set_token_estimator(before)


@pytest.mark.parametrize("name", PROSE)
def test_english_prose_is_within_twenty_percent_of_real_tokenizers(name: str) -> None:
    # COST-23
    text, counts = PROSE[name]
    for counted in counts:
        assert estimate_tokens(text) == pytest.approx(counted, rel=0.2)


def test_json_counts_its_punctuation_and_digits() -> None:
    # COST-23: 36 tokens in both encodings for one such object.
    text = '{"city": "Berlin", "days": [1,2,3], "unit": "celsius", "nested": {"a": true, "b": null}}' * 10
    assert estimate_tokens(text) == pytest.approx(360, rel=0.2)


def test_cjk_text_is_about_one_token_a_character() -> None:
    # COST-23
    text = "今天的天气很好，我们决定去公园散步。"
    assert estimate_tokens(text) == pytest.approx(len(text), rel=0.2)


def test_mixed_text_adds_up_over_its_scripts() -> None:
    latin, cjk = "hello world, how are you today " * 10, "天气很好" * 10
    assert estimate_tokens(latin + cjk) == pytest.approx(estimate_tokens(latin) + estimate_tokens(cjk), abs=1)
    assert estimate_tokens("Привет, как дела?") > estimate_tokens("Hallo, wie geht's?")


def test_empty_text_has_no_tokens_and_a_message_has_a_frame() -> None:
    # COST-23
    assert estimate_tokens("") == 0
    assert estimate_tokens(user("")) > 0
    assert estimate_tokens([]) == 0


def test_a_list_is_the_sum_of_its_messages() -> None:
    messages = [user("hello there"), assistant("general greetings")]
    assert estimate_tokens(messages) == sum(estimate_tokens(message) for message in messages)


def test_tool_calls_count_with_their_json() -> None:
    # COST-23
    bare = assistant("ok")
    calling = assistant("ok", [ToolCall("1", "get_weather", '{"city": "' + "x" * 400 + '"}')])
    assert estimate_tokens(calling) - estimate_tokens(bare) > 80


def test_each_image_or_file_counts_a_thousand_tokens() -> None:
    # COST-23, PRV-24
    text = estimate_tokens(user([TextPart("look")]))
    both = estimate_tokens(user([TextPart("look"), ImagePart(b"\x89PNG" + b"0" * 100_000), ImagePart("https://h/x.png")]))
    assert both - text == 2_000


def test_a_request_counts_messages_and_tool_definitions() -> None:
    tool = ToolDefinition("search", "Searches the web for pages.", {"type": "object", "properties": {"q": {"type": "string"}}})
    alone = estimate_request_tokens(GenerateOptions(messages=[user("hi")]))
    assert estimate_request_tokens(GenerateOptions(messages=[user("hi")], tools=(tool,))) > alone + 15


def test_an_estimate_is_made_once_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    message = user("some text that is long enough")
    first = estimate_tokens([message])
    monkeypatch.setattr(tokens, "_builtin", lambda text: pytest.fail("counted again"))
    assert estimate_tokens([message]) == first
    assert estimate_tokens(message) == first


def test_a_custom_estimator_replaces_the_rule_and_gets_the_model() -> None:
    # COST-23
    seen: list[tuple[str, str | None]] = []

    def count(text: str, model: str | None) -> int:
        seen.append((text, model))
        return 7

    message = user("text")
    plain = estimate_tokens(message)
    set_token_estimator(count)
    assert estimate_tokens("anything", "gpt-5") == 7
    assert estimate_tokens(message, "gpt-5") == 7 + tokens.MESSAGE_OVERHEAD_TOKENS
    assert seen == [("anything", "gpt-5"), ("text", "gpt-5")]
    assert estimate_tokens(message, "gpt-5") == 7 + tokens.MESSAGE_OVERHEAD_TOKENS
    assert len(seen) == 2
    estimate_tokens(message, "claude-sonnet-5")
    assert seen[-1] == ("text", "claude-sonnet-5")
    set_token_estimator(None)
    assert estimate_tokens(message) == plain


def test_an_estimator_given_with_the_call_beats_the_global_one() -> None:
    set_token_estimator(lambda text, model: 1)
    assert estimate_tokens("abc", estimator=lambda text, model: 99) == 99


def test_a_raising_estimator_falls_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    # COST-23
    def broken(text: str, model: str | None) -> int:
        raise RuntimeError("no vocabulary")

    expected = estimate_tokens("hello world")
    set_token_estimator(broken)
    with caplog.at_level(logging.WARNING, logger="lousho_ray.tokens"):
        assert estimate_tokens("hello world") == expected
        assert estimate_tokens([Message("user", "hello world")]) == expected + tokens.MESSAGE_OVERHEAD_TOKENS
    assert len(caplog.records) == 1

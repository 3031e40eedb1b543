"""What all HTTP providers share: options, imports, masked keys, transcripts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError, MissingDependencyError
from lousho_ray.messages import Message, ToolCall, assistant, system, tool_result, user
from lousho_ray.providers.base import HTTPProvider, import_client, public_url, split_system
from lousho_ray.providers.compatible import OpenAICompatibleProvider
from lousho_ray.providers.openai import OpenAIProvider
from lousho_ray.providers.openrouter import OpenRouterProvider
from lousho_ray.providers.reasoning_models import claude_reasons, openai_reasons, openrouter_reasons
from lousho_ray.providers.transcript import clean_text, mistral_id, repair_pairs, wire_id, wire_name


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": True}, "max_retries"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"idle_timeout_ms": "1"}, "idle_timeout_ms"),
        ({"connect_timeout_ms": float("nan")}, "connect_timeout_ms"),
        ({"context_window": 0}, "context_window"),
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "http://"}, "base_url"),
        ({"unsupported_files": "drop"}, "unsupported_files"),
        ({"api": "completions"}, "api"),
        ({"apikey": "x"}, "apikey"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options: dict[str, Any], field: str) -> None:
    # PRV-11
    with pytest.raises(ConfigurationError) as caught:
        OpenAIProvider(**options)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", field)


def test_an_unknown_option_gets_the_closest_one() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'stream_usage'"):
        OpenAICompatibleProvider(base_url="http://h/v1", stream_usages=True)
    with pytest.raises(ConfigurationError, match="Did you mean 'default_model'"):
        OpenRouterProvider(default_modell="x")


def test_calls_are_limited_unasked() -> None:
    # LES-02
    provider = OpenAIProvider(api_key="k")
    limits = (provider.connect_timeout_ms, provider.timeout_ms, provider.idle_timeout_ms, provider.max_retries)
    assert limits == (10_000, 600_000, 120_000, 2)
    assert OpenAIProvider(timeout_ms=None).timeout_ms is None


async def test_a_missing_key_is_an_error_of_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    provider = OpenAIProvider()
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY") as caught:
        await provider.client()
    assert caught.value.code == "LOUSHO_PROVIDER_MISSING_API_KEY"


def test_a_failed_import_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    # PRV-13
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingDependencyError) as caught:
        import_client("openai", "openai[aiohttp]")
    assert caught.value.install_command == "pip install 'openai[aiohttp]'"
    monkeypatch.undo()
    assert import_client("openai", "openai[aiohttp]").__name__ == "openai"


def test_a_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    provider = HTTPProvider()
    for _ in range(2):
        provider.warn("a", "said once")
    assert [record.getMessage() for record in caplog.records] == ["http: said once"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:sekret@127.0.0.1:1/v1?api_key=sk-test", "http://127.0.0.1:1/v1"),
        ("https://[::1]:8/x#y", "https://[::1]:8/x"),
        ("http://h:notaport/", "(unreadable URL)"),
    ],
)
def test_a_printed_url_has_no_credentials(url: str, shown: str) -> None:
    # Field case X01
    assert public_url(url) == shown
    assert "sekret" not in repr(HTTPProvider(base_url="http://user:sekret@127.0.0.1:1/v1?api_key=sk-test"))


def test_credentials_of_url_and_headers_are_secrets() -> None:
    headers = {"Authorization": "Bearer abcdef", "apikey": "ghijkl", "X-Title": "shown"}
    found = HTTPProvider(api_key="key123", base_url="http://u:sekret@h/?token=qwerty", headers=headers).secrets()
    assert {"key123", "sekret", "qwerty", "abcdef", "ghijkl"} <= found
    assert "shown" not in found


def test_system_text_is_folded_in_order() -> None:
    # RUN-15
    messages = [system("a"), user("u"), system("b"), assistant("x")]
    text, rest = split_system(messages)
    assert text == "a\n\nb"
    assert list(rest) == [messages[1], messages[3]]
    assert split_system([]) == ("", [])
    assert split_system([system("a"), user("u")])[0] == "a"


def test_a_sound_transcript_is_passed_on_as_it_is() -> None:
    call = ToolCall("a", "f")
    messages = [user("u"), assistant("", [call]), tool_result(call, "1")]
    assert repair_pairs(messages, pytest.fail) is messages


def test_a_repair_names_the_ids_it_touches() -> None:
    # PRV-D10
    said: list[str] = []
    late = ToolCall("late", "f")
    messages = [
        Message("tool", "x", tool_call_id="gone"),
        assistant("", [late, ToolCall("never", "g")]),
        user("steered"),
        tool_result(late, "2"),
    ]
    repaired = repair_pairs(messages, lambda key, text: said.append(text))
    assert [(m.role, m.tool_call_id) for m in repaired] == [
        ("assistant", None),
        ("tool", "late"),
        ("tool", "never"),
        ("user", None),
    ]
    assert repaired[2].is_error
    assert any("'gone'" in text for text in said)
    assert any("'never'" in text for text in said)


def test_ids_and_names_are_made_legal_the_same_way_each_time() -> None:
    # Field case L07
    assert wire_id("call_1") == "call_1"
    assert wire_id("a|b") == wire_id("a|b") != wire_id("a|c")
    assert len(wire_id("x" * 99, 40)) <= 40
    assert len(mistral_id("call_1")) == 9
    assert mistral_id("abc123XYZ") == "abc123XYZ"
    assert wire_name("functions.f x") == "functions_f_x"
    assert wire_name("") == "unknown"
    assert clean_text("a\ud83d\ude00\ud83d") == "a😀\ufffd"


@pytest.mark.parametrize(
    ("rule", "yes", "no"),
    [
        (
            openai_reasons,
            ["o1", "o3-mini", "O4-mini", "gpt-5", "gpt-5.1-codex", "gpt-10"],
            ["o1-mini", "o1-preview", "gpt-5-chat-latest", "gpt-4o"],
        ),
        (claude_reasons, ["claude-3-7-sonnet-latest", "claude-sonnet-4-5", "claude-opus-5"], ["claude-3-5-sonnet", "claude-2"]),
        (
            openrouter_reasons,
            [
                "openai/o3",
                "anthropic/claude-3.7-sonnet",
                "deepseek/deepseek-r1",
                "google/gemini-2.5-pro",
                "x-ai/grok-4",
                "q/qwen3-8b",
                "a/b:thinking",
            ],
            ["openai/gpt-4o", "google/gemini-2.0-flash", "x-ai/grok-2", "meta/llama-3"],
        ),
    ],
)
def test_reasoning_families(rule: Any, yes: list[str], no: list[str]) -> None:
    # PRV-79, PRV-79b
    assert [model for model in yes if not rule(model)] == []
    assert [model for model in no if rule(model)] == []

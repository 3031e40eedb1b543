"""Embedders for tests: vectors without a model, and recordings of one that has one."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.embedders import Embedder, check_embedder, embed
from lousho_ray.errors import CassetteError, CassetteMismatchError, ConfigurationError, LLMProviderError
from lousho_ray.providers.failures import classify
from lousho_ray.testing import hash_embedder, record_replay, record_replay_embedder


class Lengths:
    """A vector of a text's length and of what it is for."""

    id = "lengths"

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    async def __call__(self, texts: Sequence[str], /, *, input_type: str = "none") -> list[list[float]]:
        self.batches.append(list(texts))
        return [[len(text), len(input_type) / 3] for text in texts]


class Returns:
    id = "returns"

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    async def __call__(self, texts: Sequence[str], /) -> Any:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


class Down(Exception):
    status_code = 503


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


async def test_texts_that_share_word_stems_have_similar_vectors() -> None:
    # MEM-30, TEST-02
    texts = ["The cat moved.", "cats MOVING; the", "education", "café stories", "The Café's story", "Über_uns"]
    cat, cats, education, stories, story, _ = vectors = await hash_embedder()(texts)
    assert [len(vector) for vector in vectors] == [256] * 6
    assert [round(math.hypot(*vector), 9) for vector in vectors] == [1.0] * 6
    assert round(cosine(cat, cats), 9) == 1.0
    assert cosine(stories, story) > 0.6
    assert cosine(cat, education) == cosine(stories, cats) == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [("run", "running"), ("falls", "falling"), ("box", "boxes"), ("class", "classes"), ("party", "parties"), ("bake", "baked")],
)
async def test_common_endings_do_not_count(one: str, other: str) -> None:
    # MEM-30
    left, right = await hash_embedder()([one, other])
    assert left == right


@pytest.mark.parametrize(("one", "other"), [("sing", "s"), ("bus", "bu"), ("this", "thi"), ("red", "r"), ("bass", "bas")])
async def test_short_words_stay_as_they_are(one: str, other: str) -> None:
    left, right = await hash_embedder()([one, other])
    assert left != right


async def test_a_text_without_a_word_has_the_zero_vector_and_dimensions_are_a_choice() -> None:
    embedder = hash_embedder(dimensions=8)
    assert await embedder(["", " -- "]) == [[0.0] * 8] * 2
    assert await embedder([]) == []
    assert (embedder.id, hash_embedder().id) == ("hash-8", "hash-256")
    with pytest.raises(ConfigurationError, match="dimensions must be a whole number of at least 1"):
        hash_embedder(dimensions=0)


async def test_vectors_are_the_same_in_every_process() -> None:
    # MEM-30: Python's own hash of a text is another one in each process
    code = "import asyncio; from lousho_ray.testing import hash_embedder as h; print(asyncio.run(h(dimensions=16)(['two cats'])))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == await hash_embedder(dimensions=16)(["two cats"])


async def test_a_call_tells_what_texts_are_for_to_those_who_take_it() -> None:
    # LES-38
    assert await embed(Lengths(), ["ab"], "query") == [[2.0, 5 / 3]]
    assert await embed(Lengths(), ["ab"]) == [[2.0, 4 / 3]]
    assert await embed(Returns([(1, 2)]), ["ab"], "query") == [[1.0, 2.0]]
    assert isinstance(Lengths(), Embedder)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (None, "no list of vectors"),
        ([["x"]], "no list of vectors"),
        ([], "0 vectors for 1 texts"),
        ([[1.0], [2.0]], "2 vectors for 1 texts"),
        ([[float("nan")]], "not finite"),
    ],
)
async def test_a_reply_that_is_no_vector_for_each_text_is_refused(reply: Any, said: str) -> None:
    with pytest.raises(LLMProviderError, match=f"'returns' returned .*{said}"):
        await embed(Returns(reply), ["a"])


async def test_vectors_of_different_lengths_are_refused() -> None:
    with pytest.raises(LLMProviderError, match="different lengths"):
        await embed(Returns([[1.0], [1.0, 2.0]]), ["a", "b"])


@pytest.mark.parametrize("wrong", [None, "text-embedding-3-small", Lengths, lambda texts: texts])
def test_what_is_no_embedder_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be an embedder, an async callable that has a text as its `id`"):
        check_embedder(wrong)


async def test_embeddings_are_replayed_as_they_were_recorded(tmp_path: Path) -> None:
    # LES-41
    path, inner = tmp_path / "deep" / "vectors.json", Lengths()
    live = record_replay_embedder(lambda: inner, cassette=path)
    first = await live(["a", "bcd"], input_type="document")
    second = await live(["a"])
    again = record_replay_embedder(None, cassette=path)
    assert (live.id, again.id, live.replays, again.replays) == ("lengths", "lengths", False, True)
    assert [await again(["a", "bcd"], input_type="document"), await again(["a"])] == [first, second]
    assert first == [[1.0, 8 / 3], [3.0, 8 / 3]]
    assert inner.batches == [["a", "bcd"], ["a"]]
    data = json.loads(path.read_text())
    assert data["provider"] == {"name": "lengths", "defaultModel": None}
    assert data["entries"][0]["request"] == {"texts": ["a", "bcd"], "inputType": "document"}


async def test_the_mode_is_automatic_or_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CASS-15
    path = tmp_path / "c.json"
    with pytest.raises(CassetteError, match="does not exist"):
        record_replay_embedder(Lengths(), cassette=path, mode="replay")
    with pytest.raises(ConfigurationError, match="needs an embedder"):
        record_replay_embedder(None, cassette=path)
    with pytest.raises(ConfigurationError, match="mode must be one of"):
        record_replay_embedder(Lengths(), cassette=path, mode="rec")  # type: ignore[arg-type]
    await record_replay_embedder(Lengths(), cassette=path)(["a"])
    monkeypatch.setenv("LOUSHO_RECORD", "1")
    recorder = record_replay_embedder(Lengths(), cassette=path)
    assert await recorder(["other"]) == [[5.0, 4 / 3]]
    monkeypatch.delenv("LOUSHO_RECORD")
    assert await record_replay_embedder(None, cassette=path)(["other"]) == [[5.0, 4 / 3]]


async def test_other_texts_are_an_error_that_names_the_first_difference(tmp_path: Path) -> None:
    # LES-41
    path = tmp_path / "c.json"
    await record_replay_embedder(Lengths(), cassette=path, mode="record")(["a", "b"], input_type="query")
    changed: list[tuple[list[str], dict[str, Any], str]] = [
        (["a", "c"], {"input_type": "query"}, r"differs at texts\[1\]: recorded 'b', now 'c'"),
        (["a", "b"], {}, "differs at inputType"),
    ]
    for texts, options, said in changed:
        with pytest.raises(CassetteMismatchError, match=said) as caught:
            await record_replay_embedder(None, cassette=path, hint="Do it again.")(texts, **options)
        assert caught.value.call_number == 1
        assert "Do it again." in str(caught.value)
    player = record_replay_embedder(None, cassette=path)
    await player(["a", "b"], input_type="query")
    with pytest.raises(CassetteMismatchError, match=r"has no more entry for it \(1 in all\) Its texts are \['a'\]"):
        await player(["a"])


async def test_times_and_ids_do_not_count_and_requests_may_come_in_another_order(tmp_path: Path) -> None:
    # CASS-10
    path = tmp_path / "c.json"
    recorder = record_replay_embedder(Lengths(), cassette=path, mode="record")
    await recorder(["at 2024-01-01T10:00:00Z"])
    await recorder(["b"])
    player = record_replay_embedder(None, cassette=path, match="request")
    assert await player(["b"]) == [[1.0, 4 / 3]]
    assert await player(["at 2026-05-06T10:00:00Z"]) == [[23.0, 4 / 3]]
    with pytest.raises(CassetteMismatchError, match="has no unused equal entry"):
        await player(["b"])


async def test_keys_are_not_written_and_own_redaction_and_normalization_hold(tmp_path: Path) -> None:
    # CASS-11, CASS-12
    path = tmp_path / "c.json"

    def redact(text: str) -> str:
        return text.replace("Ada", "<name>")

    def normalize(request: dict[str, Any]) -> dict[str, Any]:
        return {**request, "texts": [text.lower() for text in request["texts"]]}

    await record_replay_embedder(Lengths(), cassette=path, redact=redact)(["Ada has sk-abcdefgh12345678"])
    assert json.loads(path.read_text())["entries"][0]["request"]["texts"] == ["<name> has [REDACTED]"]
    player = record_replay_embedder(None, cassette=path, redact=redact, normalize=normalize)
    assert await player(["Ada HAS sk-zzzzzzzz12345678"]) == [[27.0, 4 / 3]]


async def test_an_error_is_replayed_as_it_was_judged(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    recorder = record_replay_embedder(Returns(Down("busy")), cassette=path)
    with pytest.raises(Down):
        await recorder(["a"])
    with pytest.raises(Exception, match="busy") as caught:
        await record_replay_embedder(None, cassette=path)(["a"])
    assert (type(caught.value).__name__, classify(caught.value).retryable) == ("Down", classify(Down("busy")).retryable)


async def test_recording_the_same_again_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    # LES-44
    path = tmp_path / "c.json"
    await record_replay_embedder(Lengths(), cassette=path, mode="record")(["a"])
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "recordedAt": "2020-01-01T00:00:00.000Z"}, indent=2) + "\n")
    before = path.read_bytes()
    await record_replay_embedder(Lengths(), cassette=path, mode="record")(["a"])
    assert path.read_bytes() == before


async def test_a_file_has_one_recorder_until_that_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    gc.disable()
    try:
        first = record_replay_embedder(Lengths(), cassette=path, mode="record")
        with pytest.raises(ConfigurationError, match="recording to"):
            record_replay_embedder(Lengths(), cassette=path, mode="record")
        first.close()
        second = record_replay_embedder(Lengths(), cassette=path, mode="record")
        with pytest.raises(ConfigurationError, match="recording to"):
            await first(["a"])
        second.close()
    finally:
        gc.enable()


BROKEN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda entry: entry.update(kind="generate"), "its kind is not 'embed'"),
    (lambda entry: entry.update(request=[]), "no request with texts"),
    (lambda entry: entry["response"]["vectors"].pop(), "no vector for each of its 2 texts"),
    (lambda entry: entry.pop("response"), "no vector for each of its 2 texts"),
    (lambda entry: entry["response"].update(vectors=[["x"], [1.0]]), "no list of numbers"),
    (lambda entry: entry.update(error={}), "no name and message"),
]


@pytest.mark.parametrize(("change", "said"), BROKEN)
async def test_a_malformed_entry_is_named(change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path) -> None:
    # CASS-13
    path = tmp_path / "c.json"
    await record_replay_embedder(Lengths(), cassette=path)(["a", "b"])
    data = json.loads(path.read_text())
    change(data["entries"][0])
    path.write_text(json.dumps(data))
    with pytest.raises(CassetteError, match=f"malformed entry 1: .*{said}"):
        record_replay_embedder(None, cassette=path)


async def test_a_cassette_of_an_embedder_is_none_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    await record_replay_embedder(Lengths(), cassette=path)(["a"])
    with pytest.raises(CassetteError, match="neither 'generate' nor 'stream'"):
        record_replay(None, cassette=path)

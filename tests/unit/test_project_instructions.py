"""Project instructions: which file is found, what of it is read, and where it stands in the system prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from lousho_ray import ConfigurationError, MockProvider, create_agent
from lousho_ray.project_instructions import load_project_instructions
from lousho_ray.testing import mock_model


def _project(root: Path) -> Path:
    (root / ".git").mkdir()
    inner = root / "packages" / "api"
    inner.mkdir(parents=True)
    return inner


def test_the_nearest_folder_with_a_file_wins_and_in_it_the_first_name(tmp_path: Path) -> None:
    # CA-40
    inner = _project(tmp_path)
    (tmp_path / "AGENTS.md").write_text("outer")
    found = load_project_instructions(inner)
    assert found is not None
    assert found.content == "outer"
    (inner / "CLAUDE.md").write_text("inner claude")
    found = load_project_instructions(inner)
    assert found is not None
    assert found.content == "inner claude"  # a later name nearer by beats the first name further up
    (inner / "AGENTS.md").write_text("inner agents")
    found = load_project_instructions(inner)
    assert found is not None
    assert (found.path.name, found.content) == ("AGENTS.md", "inner agents")


def test_the_walk_ends_at_the_folder_with_git_and_at_stop_at(tmp_path: Path) -> None:
    # CA-40, CA-43
    inner = _project(tmp_path / "repo") if (tmp_path / "repo").mkdir() is None else tmp_path
    (tmp_path / "AGENTS.md").write_text("outside")
    assert load_project_instructions(inner) is None
    (tmp_path / "repo" / "AGENTS.md").write_text("repo")
    assert load_project_instructions(inner, stop_at="packages") is None
    assert load_project_instructions(inner, stop_at=tmp_path / "repo") is not None


@pytest.mark.parametrize("is_file", [False, True])
def test_the_folder_with_git_is_the_last_one_looked_at(tmp_path: Path, is_file: bool) -> None:
    # CA-40: `.git` is a file in a work tree
    inner = tmp_path / "repo" / "src"
    inner.mkdir(parents=True)
    git = tmp_path / "repo" / ".git"
    git.touch() if is_file else git.mkdir()
    (tmp_path / "AGENTS.md").write_text("outside")
    assert load_project_instructions(inner) is None
    (tmp_path / "repo" / "AGENTS.md").write_text("repo")
    found = load_project_instructions(inner)
    assert found is not None
    assert found.content == "repo"


def test_long_text_is_cut_and_bad_bytes_are_replaced(tmp_path: Path) -> None:
    # CA-41, CA-D10
    (tmp_path / ".git").mkdir()
    (tmp_path / "AGENTS.md").write_bytes(b"\xef\xbb\xbfrule \xff one" + b"x" * 40_000)
    found = load_project_instructions(tmp_path)
    assert found is not None
    assert found.content.startswith("rule \ufffd one")
    assert "characters left out]" in found.content
    assert len(found.content) < 32_100


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    # CA-D10
    (tmp_path / "secret.md").write_text("secret")
    project = tmp_path / "project"
    project.mkdir()
    (project / ".git").mkdir()
    (project / "AGENTS.md").symlink_to(tmp_path / "secret.md")
    assert load_project_instructions(project) is None


def test_a_missing_folder_and_names_with_a_path_are_errors(tmp_path: Path) -> None:
    # CA-40, CA-41
    with pytest.raises(ConfigurationError) as raised:
        create_agent(provider=MockProvider(), project_instructions={"cwd": tmp_path / "nowhere"})
    assert raised.value.field == "project_instructions.cwd"
    with pytest.raises(ConfigurationError) as raised:
        create_agent(provider=MockProvider(), project_instructions={"files": ["../AGENTS.md"]})
    assert raised.value.field == "project_instructions.files"


async def test_the_block_follows_the_instructions_and_is_read_once(tmp_path: Path) -> None:
    # CA-39, CA-41, CA-42, RUN-11
    (tmp_path / ".git").mkdir()
    (tmp_path / "AGENTS.md").write_text("Use tabs.")
    model = mock_model(["a", "b"])
    agent = create_agent(provider=model, instructions="Review.", project_instructions={"cwd": str(tmp_path)}, runtime="local")
    await agent.send("x")
    (tmp_path / "AGENTS.md").write_text("Use spaces.")
    await agent.send("x")
    prompts = [call.messages[0].text for call in model.calls]
    assert prompts == ["Review.\n\n## Project instructions (from AGENTS.md)\n\nUse tabs."] * 2


async def test_without_the_option_or_a_file_nothing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-39
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    model = mock_model(["a", "b"])
    await create_agent(provider=model, instructions="Review.", project_instructions=True, runtime="local").send("x")
    (tmp_path / "AGENTS.md").write_text("Use tabs.")
    await create_agent(provider=model, instructions="Review.", runtime="local").send("x")
    assert [call.messages[0].text for call in model.calls] == ["Review.", "Review."]

"""Project instructions: the `AGENTS.md` (or `CLAUDE.md`) that a project keeps for coding agents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lousho_ray.errors import ConfigurationError

DEFAULT_FILES = ("AGENTS.md", "CLAUDE.md")
MAX_CHARS = 32_000


@dataclass(frozen=True, slots=True)
class ProjectInstructions:
    """The file that was found, and its text (cut to `max_chars`)."""

    path: Path
    content: str

    @property
    def block(self) -> str:
        """The paragraph of the system prompt."""
        return f"## Project instructions (from {self.path.name})\n\n{self.content}"


def load_project_instructions(
    cwd: str | Path | None = None,
    files: Sequence[str] | None = None,
    stop_at: str | Path | None = None,
    max_chars: int = MAX_CHARS,
) -> ProjectInstructions | None:
    """Finds the nearest project instructions; `None` when there are none.

    Args:
        cwd: Where the walk upwards begins; default the process's working directory.
        files: The names to look for, in order of preference.
        stop_at: A directory name or path that ends the walk (it is still looked at), besides the first one that has a `.git`.
        max_chars: A longer text is cut and ends with a marker.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, `field="project_instructions.cwd"`: no such directory.
    """
    start = Path.cwd() if cwd is None else Path(cwd)
    if not start.is_dir():
        raise ConfigurationError(
            f"project_instructions.cwd: there is no directory {str(start)!r}.", field="project_instructions.cwd"
        )
    for folder in _upwards(start.resolve(), stop_at):
        for name in DEFAULT_FILES if files is None else files:
            path = folder / name
            # A link may not lead out of the folder it was found in: what is read must belong to the project.
            if path.is_file() and path.resolve().parent == folder:
                return ProjectInstructions(path, _cut(path.read_bytes().decode("utf-8-sig", errors="replace"), max_chars))
    return None


def _upwards(start: Path, stop_at: str | Path | None) -> Iterator[Path]:
    end = None if stop_at is None else Path(stop_at)
    for folder in (start, *start.parents):
        yield folder
        if (folder / ".git").exists() or (end is not None and (folder.name == str(end) or folder == end)):
            return


def _cut(text: str, max_chars: int) -> str:
    text = text.strip()
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n\n[... cut: {len(text) - max_chars:,} characters left out]"

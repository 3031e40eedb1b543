"""Workspaces: files and commands an agent may work with."""

from lousho_ray.tools.workspace.fs_tools import create_fs_tools
from lousho_ray.tools.workspace.local import LocalWorkspace
from lousho_ray.tools.workspace.paths import WorkspaceError, normalize_workspace_path
from lousho_ray.tools.workspace.provider import Entry, FsProvider, MemoryWorkspace

__all__ = [
    "Entry",
    "FsProvider",
    "LocalWorkspace",
    "MemoryWorkspace",
    "WorkspaceError",
    "create_fs_tools",
    "normalize_workspace_path",
]

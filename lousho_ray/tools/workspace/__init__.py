"""Workspaces: files and commands an agent may work with."""

from lousho_ray.tools.workspace.broker import CredentialBroker, create_credential_broker
from lousho_ray.tools.workspace.checkpoints import FileWorkspaceCheckpointStore, WorkspaceCheckpoints
from lousho_ray.tools.workspace.command_rules import exact
from lousho_ray.tools.workspace.fs_tools import create_fs_tools
from lousho_ray.tools.workspace.local import LocalWorkspace
from lousho_ray.tools.workspace.paths import WorkspaceError, normalize_workspace_path
from lousho_ray.tools.workspace.provider import Entry, FsProvider, MemoryWorkspace
from lousho_ray.tools.workspace.sandbox import SubprocessSandbox
from lousho_ray.tools.workspace.shell import NoopSandbox, SandboxAdapter, SandboxShell, ShellOutput, ShellProvider
from lousho_ray.tools.workspace.shell_tool import create_shell_tool

__all__ = [
    "CredentialBroker",
    "Entry",
    "FileWorkspaceCheckpointStore",
    "FsProvider",
    "LocalWorkspace",
    "MemoryWorkspace",
    "NoopSandbox",
    "SandboxAdapter",
    "SandboxShell",
    "ShellOutput",
    "ShellProvider",
    "SubprocessSandbox",
    "WorkspaceCheckpoints",
    "WorkspaceError",
    "create_credential_broker",
    "create_fs_tools",
    "create_shell_tool",
    "exact",
    "normalize_workspace_path",
]

"""Any executor in a child process: what `deepinfra serve` uses where a busy step would hold the server's loop."""

from deepinfra.executors.process.child import serve_child
from deepinfra.executors.process.parent import ProcessExecutor

__all__ = ("ProcessExecutor", "serve_child")

"""The torch executor. Importing this package, or making a `TorchExecutor`, does not import torch: entering it does."""

from deepinfra.executors.torch.executor import TorchExecutor

__all__ = ("TorchExecutor",)

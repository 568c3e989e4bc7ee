"""Asynchronous reinforcement learning of language models on the PyTorch-native stack.

Importing this package loads none of Monarch, vLLM, torchtitan or torch. See README.md for where to begin.
"""

__version__ = "0.1.0"

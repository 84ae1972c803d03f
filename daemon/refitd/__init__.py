"""The refitd service: owns a vLLM engine, takes weights from trainers and gives tokens back."""

from importlib.metadata import version

__version__ = version("refitd")

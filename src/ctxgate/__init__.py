"""ctxgate: a context-management gateway between long-running agents and a vLLM fleet."""

__version__ = "0.1.0"

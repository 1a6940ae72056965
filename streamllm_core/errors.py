"""The engine's errors. Each message says what is wrong and what to do; none of them is a bug."""


class StreamLLMError(Exception):
    """Root of every error that the engine raises on purpose."""


class ModelError(StreamLLMError):
    """A model that is missing, corrupt, or of an architecture or format that is not supported."""


class BudgetError(StreamLLMError):
    """The memory budget does not suffice; the message shows the arithmetic."""


class WindowError(StreamLLMError):
    """More tokens than the window, or than the model was trained for; the message shows the numbers."""


class NoFreeStream(StreamLLMError):
    """Every stream slot is taken; close one first."""

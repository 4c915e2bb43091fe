"""The one error of this package; apart from the rest so that processes without torch can name it."""


class CheckpointError(ValueError):
    """A checkpoint is missing, corrupt, inconsistent or not supported; the message is for a person."""

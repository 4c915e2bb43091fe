"""What a user can get wrong: raised anywhere below the command line, shown by it as one line without a traceback."""


class CrosskvError(Exception):
    """An expected failure whose message is written for the person who can fix it."""

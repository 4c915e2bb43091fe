"""Which part of a dimension one rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[begin, end)`` of a dimension of ``whole``."""

    begin: int
    end: int
    whole: int

    def __len__(self) -> int:
        return self.end - self.begin

    def times(self, width: int) -> "Span":
        """The same where every element stands for ``width`` consecutive ones."""
        return Span(self.begin * width, self.end * width, self.whole * width)

    def within(self, offset: int, whole: int) -> "Span":
        """The same elements of a dimension of ``whole``, of which this one is the part that begins at ``offset``."""
        return Span(offset + self.begin, offset + self.end, whole)

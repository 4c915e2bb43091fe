"""A checkpoint's vocabulary as engines need it to follow grammars."""

from pathlib import Path

from cluster.text.tokenizer import Tokenizer
from worker.grammar.grammar import GrammarError
from worker.grammar.vocabulary import SPECIAL_PIECE, Vocabulary


def vocabulary_of(directory: Path) -> Vocabulary:
    """Read the tokenizer in a directory; raises ``GrammarError`` if its texts are not its tokens' bytes, joined."""
    tokenizer = Tokenizer.from_directory(directory)
    if not tokenizer.has_pieces:
        raise GrammarError("this model's tokenizer does not spell texts byte by byte, which grammars need")
    special = tokenizer.special_ids
    return Vocabulary(tuple(SPECIAL_PIECE if i in special else tokenizer.piece(i) for i in range(tokenizer.vocab_size)))

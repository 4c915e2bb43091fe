"""Text in, token ids out, and back: the front end's use of a checkpoint's tokenizer. No torch, no transformers."""
